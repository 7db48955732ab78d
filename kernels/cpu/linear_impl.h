// Linear layers, once for vectors of any width (vectors.h).
//
// First the rows are brought into strips, as floats. Then a task is a panel: kLanes output features for all rows. The
// weight is read where it lies, some hundred input features of a panel at a time, which are packed so that a vector holds
// one input feature of many output features. A packed part and a strip stay in the first cache while they are multiplied,
// and strips follow each other in memory, so that the processor fetches the next. Packing weights costs as much as some
// eight rows do.

namespace ISA {

constexpr int kDepth = 320;  // most input features of a packed part

// How many input features a part has, but for the last one: parts are as even as multiples of kLanes let them be.
inline int depth_of_parts(int64_t depth) {
  const int64_t parts = (depth + kDepth - 1) / kDepth;
  return ((depth + parts - 1) / parts + kLanes - 1) / kLanes * kLanes;
}

inline int64_t strips_of(int64_t rows) { return (rows + kMostRows - 1) / kMostRows; }

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

// A strip of rows, to packed[part][strip][input feature of the part][kMostRows]; 0 where there are fewer rows.
template <typename Element>
void pack_strip(const Linear& layer, int64_t strip, float* packed) {
  const int64_t depth = layer.in_features, step = depth_of_parts(depth), strips = strips_of(layer.num_rows);
  const int rows = std::min<int64_t>(kMostRows, layer.num_rows - strip * kMostRows);
  const Element* from = static_cast<const Element*>(layer.rows) + strip * kMostRows * depth;
  for (int64_t begin = 0; begin < depth; begin += step) {
    const int64_t part = std::min(step, depth - begin);
    float* to = packed + (begin * strips + strip * part) * kMostRows;
    int64_t i = 0;
    for (; i + VECTOR_FLOATS <= part; i += VECTOR_FLOATS) {
      Vec square[VECTOR_FLOATS];
#pragma GCC unroll 16
      for (int r = 0; r < VECTOR_FLOATS; r++) square[r] = r < rows ? load_floats(from + r * depth + begin + i) : Vec{};
      transpose(square);
#pragma GCC unroll 16
      for (int r = 0; r < VECTOR_FLOATS; r++) std::memcpy(to + (i + r) * kMostRows, &square[r], kMostRows * sizeof(float));
    }
    for (; i < part; i++)
      for (int r = 0; r < kMostRows; r++) to[i * kMostRows + r] = r < rows ? to_float(from[r * depth + begin + i]) : 0;
  }
}

// One panel for all rows, which are in strips; `sums` is [num_rows][kLanes].
template <typename Element>
void multiply_panel(const Linear& layer, const float* strips, int64_t first, float* sums) {
  const int64_t depth = layer.in_features, step = depth_of_parts(depth), last = layer.out_features - 1;
  const int count = std::min<int64_t>(kLanes, last + 1 - first);
  const Element* weight[kLanes];  // where there are fewer features, the last one again
  for (int lane = 0; lane < kLanes; lane++)
    weight[lane] = static_cast<const Element*>(layer.weight) + std::min(first + lane, last) * layer.weight_stride;
  alignas(64) float panel[kDepth * kLanes];
  for (int64_t begin = 0; begin < depth; begin += step) {
    const int64_t part = std::min(step, depth - begin);
    pack_panel(weight, begin, part, panel);
    const Strips left{strips + begin * strips_of(layer.num_rows) * kMostRows, part};
    const Strided<float> right{panel, kLanes};
    if (begin)
      multiply<true>(left, right, part, sums, kLanes, layer.num_rows);
    else
      multiply<false>(left, right, part, sums, kLanes, layer.num_rows);
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
  const int64_t strips = strips_of(layer.num_rows), panels = (layer.out_features + kLanes - 1) / kLanes;
  std::atomic<int64_t> next_strip{0}, next_panel{0};
#pragma omp parallel if (layer.num_rows * layer.in_features * layer.out_features >= kWorthThreads)
  {
    for (int64_t strip; (strip = next_strip++) < strips;) pack_strip<Element>(layer, strip, layer.strips);
#pragma omp barrier
    std::unique_ptr<float[]> sums(new float[layer.num_rows * kLanes]);  // 64 bytes a row
    for (int64_t panel; (panel = next_panel++) < panels;)
      multiply_panel<Element>(layer, layer.strips, panel * kLanes, sums.get());
  }
}

void linear_layer(const Linear& layer) {
  if (layer.dtype == kFloat32)
    multiply_panels<float>(layer);
  else
    multiply_panels<uint16_t>(layer);
}

}  // namespace ISA
