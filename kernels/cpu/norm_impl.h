// RMS norms, once for vectors of any width (vectors.h).

namespace ISA {

template <typename Element>
void norm_row(const Element* row, const Element* weight, Element* out, int64_t width, float epsilon) {
  Vec squares = {};
  float rest = 0;
  int64_t i = 0;
  for (; i + VECTOR_FLOATS <= width; i += VECTOR_FLOATS) {
    const Vec x = load_floats(row + i);
    squares = squares + x * x;
  }
  for (int64_t j = i; j < width; j++) rest += to_float(row[j]) * to_float(row[j]);
  for (int lane = 0; lane < VECTOR_FLOATS; lane++) rest += squares[lane];
  const float scale = 1 / std::sqrt(rest / width + epsilon);
  for (i = 0; i + VECTOR_FLOATS <= width; i += VECTOR_FLOATS) {
    store_floats(load_floats(row + i) * scale, out + i);
    store_floats(load_floats(weight + i) * load_floats(out + i), out + i);
  }
  for (; i < width; i++) {
    from_float(to_float(row[i]) * scale, out + i);
    from_float(to_float(weight[i]) * to_float(out[i]), out + i);
  }
}

template <typename Element>
void norm_rows(const void* rows, const void* weight, void* out, int64_t num_rows, int64_t width, float epsilon) {
#pragma omp parallel for schedule(static) if (num_rows * width >= kWorthThreads)
  for (int64_t r = 0; r < num_rows; r++)
    norm_row(static_cast<const Element*>(rows) + r * width, static_cast<const Element*>(weight),
             static_cast<Element*>(out) + r * width, width, epsilon);
}

void rms_norm(const void* rows, const void* weight, void* out, int64_t num_rows, int64_t width, float epsilon,
              int32_t dtype) {
  (dtype == kFloat32 ? norm_rows<float> : norm_rows<uint16_t>)(rows, weight, out, num_rows, width, epsilon);
}

}  // namespace ISA
