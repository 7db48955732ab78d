// Decoder layers but for their attention, of the other kernels.

namespace ISA {

template <typename Element>
void add_numbers(const void* left, const void* right, void* out, int64_t size) {
  const auto *a = static_cast<const Element*>(left), *b = static_cast<const Element*>(right);
  auto* sums = static_cast<Element*>(out);
  const int64_t whole = size / VECTOR_FLOATS * VECTOR_FLOATS;
#pragma omp parallel for schedule(static) if (size >= kWorthThreads)
  for (int64_t i = 0; i < whole; i += VECTOR_FLOATS) store_floats(load_floats(a + i) + load_floats(b + i), sums + i);
  Element rest[2][VECTOR_FLOATS] = {};  // the last ones go through the same code
  std::copy(a + whole, a + size, rest[0]);
  std::copy(b + whole, b + size, rest[1]);
  store_floats(load_floats(rest[0]) + load_floats(rest[1]), rest[0]);
  std::copy_n(rest[0], size - whole, sums + whole);
}

// `out` may be one of the others.
inline void add(const void* left, const void* right, void* out, int64_t size, int32_t dtype) {
  (dtype == kFloat32 ? add_numbers<float> : add_numbers<uint16_t>)(left, right, out, size);
}

inline void norm_heads(const Norm& norm, const Linear& heads, int64_t dim) {
  if (norm.weight)
    rms_norm(heads.out, norm.weight, heads.out, heads.num_rows * (heads.out_features / dim), dim, norm.epsilon, heads.dtype);
}

void layer_start(const LayerStart& start) {
  rms_norm(start.hidden, start.norm.weight, start.normed, start.num_tokens, start.width, start.norm.epsilon,
           start.rotary.dtype);
  for (const Linear* layer : {&start.query, &start.key, &start.value}) linear_layer(*layer);
  norm_heads(start.query_norm, start.query, start.rotary.dim);
  norm_heads(start.key_norm, start.key, start.rotary.dim);
  rotate(start.rotary);
}

void layer_end(const LayerEnd& end) {
  const int64_t size = end.num_tokens * end.width;
  const int32_t dtype = end.down.dtype;
  linear_layer(end.projection);
  add(end.hidden, end.projection.out, end.sums, size, dtype);
  rms_norm(end.sums, end.norm.weight, end.normed, end.num_tokens, end.width, end.norm.epsilon, dtype);
  linear_layer(end.gated);
  linear_layer(end.down);
  add(end.sums, end.down.out, end.down.out, size, dtype);
}

}  // namespace ISA
