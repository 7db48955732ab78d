// Linear layers, once for vectors of any width (vectors.h).
//
// A task is a panel: kLanes output features for all rows. The weight is read where it lies, kDepth input features of a
// panel at a time, which are packed so that a vector holds one input feature of many output features; that stays in the
// first cache while all rows pass. Packing costs as much as some eight rows do.

namespace ISA {

constexpr int kDepth = 256;

// Takes elements from two vectors: from `low` where bit kDistance of the place is 0, else from `high`. kOffset is 0 or
// kDistance: how far up in them it starts.
template <int kDistance, int kOffset, int... I>
inline Vec interleave(Vec low, Vec high, std::integer_sequence<int, I...>) {
#ifdef __clang__
  return __builtin_shufflevector(low, high, (I & kDistance ? VECTOR_FLOATS + I - kDistance : I) + kOffset...);
#else
  return __builtin_shuffle(low, high, VecInt{(I & kDistance ? VECTOR_FLOATS + I - kDistance : I) + kOffset...});
#endif
}

// Transposes a square of vectors: bit after bit of the row's number becomes that of the column's.
template <int kDistance = 1>
inline void transpose(Vec (&square)[VECTOR_FLOATS]) {
  constexpr std::make_integer_sequence<int, VECTOR_FLOATS> indices;
#pragma GCC unroll 16
  for (int i = 0; i < VECTOR_FLOATS; i++)
    if (!(i & kDistance)) {
      const Vec low = square[i], high = square[i + kDistance];
      square[i] = interleave<kDistance, 0>(low, high, indices);
      square[i + kDistance] = interleave<kDistance, kDistance>(low, high, indices);
    }
  if constexpr (2 * kDistance < VECTOR_FLOATS) transpose<2 * kDistance>(square);
}

// The next `depth` input features of a panel's output features, whose weights are at `rows`, to panel[depth][kLanes].
template <typename Element>
void pack_panel(const Element* const* rows, int64_t begin, int depth, float* panel) {
  int i = 0;
  for (; i + VECTOR_FLOATS <= depth; i += VECTOR_FLOATS)
    for (int lane = 0; lane < kLanes; lane += VECTOR_FLOATS) {
      Vec square[VECTOR_FLOATS];
#pragma GCC unroll 16
      for (int r = 0; r < VECTOR_FLOATS; r++) square[r] = load_floats(rows[lane + r] + begin + i);
      transpose(square);
#pragma GCC unroll 16
      for (int r = 0; r < VECTOR_FLOATS; r++) store(panel + (i + r) * kLanes + lane, square[r]);
    }
  for (; i < depth; i++)
    for (int lane = 0; lane < kLanes; lane++) panel[i * kLanes + lane] = to_float(rows[lane][begin + i]);
}

// One panel for all rows; `sums` is [num_rows][kLanes].
template <typename Element>
void multiply_panel(const Linear& layer, int64_t first, float* sums) {
  const int64_t depth = layer.in_features, last = layer.out_features - 1;
  const int count = std::min<int64_t>(kLanes, last + 1 - first);
  const Element* weight[kLanes];  // where there are fewer features, the last one again
  for (int lane = 0; lane < kLanes; lane++)
    weight[lane] = static_cast<const Element*>(layer.weight) + std::min(first + lane, last) * layer.weight_stride;
  alignas(64) float panel[kDepth * kLanes];
  for (int64_t begin = 0; begin < depth; begin += kDepth) {
    const int part = std::min<int64_t>(kDepth, depth - begin);
    pack_panel(weight, begin, part, panel);
    const Strided<float> right{panel, kLanes};
    if (begin)
      multiply<true>(layer.rows + begin, depth, right, part, sums, kLanes, layer.num_rows);
    else
      multiply<false>(layer.rows, depth, right, part, sums, kLanes, layer.num_rows);
  }
  float bias[kLanes] = {};
  if (layer.bias)
    for (int lane = 0; lane < count; lane++) bias[lane] = to_float(static_cast<const Element*>(layer.bias)[first + lane]);
  Element* out = static_cast<Element*>(layer.out) + first;
  for (int64_t r = 0; r < layer.num_rows; r++, out += layer.out_features, sums += kLanes)
    if (count == kLanes)
      for (int lane = 0; lane < kLanes; lane += VECTOR_FLOATS) store_floats(load(sums + lane) + load(bias + lane), out + lane);
    else
      for (int lane = 0; lane < count; lane++) from_float(sums[lane] + bias[lane], out + lane);
}

template <typename Element>
void multiply_panels(const Linear& layer) {
  const int64_t panels = (layer.out_features + kLanes - 1) / kLanes;
  std::atomic<int64_t> next{0};
#pragma omp parallel if (layer.num_rows * layer.in_features * layer.out_features >= kWorthThreads)
  {
    std::unique_ptr<float[]> sums(new float[layer.num_rows * kLanes]);  // 64 bytes a row
    for (int64_t panel; (panel = next++) < panels;) multiply_panel<Element>(layer, panel * kLanes, sums.get());
  }
}

void linear_layer(const Linear& layer) {
  if (layer.dtype == kFloat32)
    multiply_panels<float>(layer);
  else
    multiply_panels<uint16_t>(layer);
}

}  // namespace ISA
