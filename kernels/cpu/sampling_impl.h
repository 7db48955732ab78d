// Weights of a vocabulary's tokens, once for vectors of any width (vectors.h).

namespace ISA {

// A vector of a row's logits from `i` on; -inf behind the end.
template <typename Element>
Vec logits_at(const Element* logits, int64_t i, int64_t size) {
  if (i + VECTOR_FLOATS <= size) return load_floats(logits + i);
  Vec rest = all(-INFINITY);
  for (int lane = 0; i + lane < size; lane++) rest[lane] = to_float(logits[i + lane]);
  return rest;
}

template <typename Element>
float greatest(const Element* logits, int64_t size) {
  Vec most = all(-INFINITY);
  VecInt is_nan = {};
  for (int64_t i = 0; i < size; i += VECTOR_FLOATS) {
    const Vec some = logits_at(logits, i, size);
    most = some > most ? some : most;
    is_nan |= some != some;
  }
  float found = -INFINITY;
  for (int lane = 0; lane < VECTOR_FLOATS; lane++) {
    if (is_nan[lane]) return NAN;
    found = std::max(found, most[lane]);
  }
  return found;
}

template <typename Element>
int64_t first_of(const Element* logits, int64_t size, float wanted) {
  constexpr int64_t kAtOnce = 64;
  for (int64_t i = 0; i < size; i += kAtOnce) {
    VecInt is_here = {};
    for (int64_t j = i; j < i + kAtOnce; j += VECTOR_FLOATS) is_here |= logits_at(logits, j, size) == wanted;
    int any = 0;
    for (int lane = 0; lane < VECTOR_FLOATS; lane++) any |= is_here[lane];
    if (!any) continue;
    for (int64_t j = i; j < std::min(i + kAtOnce, size); j++)
      if (to_float(logits[j]) == wanted) return j;
  }
  return 0;  // NaN
}

// Dividing by 1 changes nothing, and takes as long as all the rest.
template <bool kDivides, typename Element>
void weigh_row(const Weighing& weighing, int64_t row, float best) {
  const auto* logits = static_cast<const Element*>(weighing.logits) + row * weighing.logits_stride;
  const float temperature = weighing.temperature[row];
  float* weights = weighing.weights + row * weighing.padded_size;
  for (int64_t i = 0; i < weighing.padded_size; i += VECTOR_FLOATS) {
    const Vec apart = logits_at(logits, i, weighing.size) - best;
    store(weights + i, exp_nonpositive(kDivides ? apart / temperature : apart));
  }
}

template <typename Element>
void weigh_rows(const Weighing& weighing) {
#pragma omp parallel for schedule(dynamic) if (weighing.num_rows * weighing.size >= kWorthThreads)
  for (int64_t row = 0; row < weighing.num_rows; row++) {
    const auto* logits = static_cast<const Element*>(weighing.logits) + row * weighing.logits_stride;
    const float best = weighing.best[row] = greatest(logits, weighing.size);
    weighing.likeliest[row] = first_of(logits, weighing.size, best);
    (weighing.temperature[row] == 1 ? weigh_row<false, Element> : weigh_row<true, Element>)(weighing, row, best);
  }
}

void weigh(const Weighing& weighing) {
  (weighing.dtype == kFloat32 ? weigh_rows<float> : weigh_rows<uint16_t>)(weighing);
}

}  // namespace ISA
