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

// kWidth rows of which each is `stride` behind the one before, and more to make up whole vectors. Where there are only
// `count` of them, it is the last one again.
template <int kWidth, typename Element>
struct RowList {
  const Element* rows[(kWidth + VECTOR_FLOATS - 1) / VECTOR_FLOATS * VECTOR_FLOATS];

  RowList(const Element* first, int64_t stride, int64_t count) {
    int64_t r = 0;
    for (const Element*& row : rows) row = first + std::min(r++, count - 1) * stride;
  }
};

// `depth` columns of these rows from `begin` on, to packed[depth][kWidth].
template <int kWidth, typename Element>
void pack(const RowList<kWidth, Element>& list, int64_t begin, int depth, float* packed) {
  static_assert(kWidth < VECTOR_FLOATS || kWidth % VECTOR_FLOATS == 0);
  constexpr size_t kStored = std::min(VECTOR_FLOATS, kWidth) * sizeof(float);  // of a vector
  int i = 0;
  for (; i + VECTOR_FLOATS <= depth; i += VECTOR_FLOATS)
    for (int lane = 0; lane < kWidth; lane += VECTOR_FLOATS) {
      Vec square[VECTOR_FLOATS];
#pragma GCC unroll 16
      for (int r = 0; r < VECTOR_FLOATS; r++) square[r] = load_floats(list.rows[lane + r] + begin + i);
      transpose(square);
#pragma GCC unroll 16
      for (int r = 0; r < VECTOR_FLOATS; r++)
        std::memcpy(packed + (i + r) * kWidth + lane, &square[r], kStored);
    }
  for (; i < depth; i++)
    for (int lane = 0; lane < kWidth; lane++) packed[i * kWidth + lane] = to_float(list.rows[lane][begin + i]);
}

// A strip of rows, to packed[part][strip][input feature of the part][kMostRows].
template <typename Element>
void pack_strip(const Linear& layer, int64_t strip, float* packed) {
  const int64_t depth = layer.in_features, step = depth_of_parts(depth), strips = strips_of(layer.num_rows);
  const int64_t first = strip * kMostRows;
  const RowList<kMostRows, Element> rows(static_cast<const Element*>(layer.rows) + first * depth, depth,
                                         layer.num_rows - first);
  for (int64_t begin = 0; begin < depth; begin += step) {
    const int64_t part = std::min(step, depth - begin);
    pack(rows, begin, part, packed + (begin * strips + strip * part) * kMostRows);
  }
}

// A matrix whose rows give one output feature each: the weight, or the gate.
struct Matrix {
  const void* rows;
  int64_t stride;
};

// One panel for all rows, which are in strips; `sums` is [num_rows][kLanes].
template <typename Element>
void multiply_panel(const Linear& layer, Matrix matrix, const float* strips, int64_t first, float* sums) {
  const int64_t depth = layer.in_features, step = depth_of_parts(depth);
  const RowList<kLanes, Element> weight(static_cast<const Element*>(matrix.rows) + first * matrix.stride, matrix.stride,
                                        layer.out_features - first);
  alignas(64) float panel[kDepth * kLanes];
  for (int64_t begin = 0; begin < depth; begin += step) {
    const int64_t part = std::min(step, depth - begin);
    pack(weight, begin, part, panel);
    const Strips left{strips + begin * strips_of(layer.num_rows) * kMostRows, part};
    const Strided<float> right{panel, kLanes};
    if (begin)
      multiply<true>(left, right, part, sums, kLanes, layer.num_rows);
    else
      multiply<false>(left, right, part, sums, kLanes, layer.num_rows);
  }
}

// Brings sums to `out`, with the bias, or as far as their gate lets them.
template <typename Element>
void store_panel(const Linear& layer, int64_t first, const float* sums, const float* gates) {
  const int count = std::min<int64_t>(kLanes, layer.out_features - first);
  float bias[kLanes] = {};
  if (layer.bias)
    for (int lane = 0; lane < count; lane++) bias[lane] = to_float(static_cast<const Element*>(layer.bias)[first + lane]);
  Element* out = static_cast<Element*>(layer.out) + first;
  for (int64_t r = 0; r < layer.num_rows; r++, out += layer.out_features) {
    Element line[kLanes];
    for (int lane = 0; lane < kLanes; lane += VECTOR_FLOATS) {
      const Vec sum = load(sums + r * kLanes + lane);
      store_floats(layer.gate ? gated<Element>(layer.activation, load(gates + r * kLanes + lane), sum)
                              : sum + load(bias + lane),
                   line + lane);
    }
    if (count == kLanes)
      std::memcpy(out, line, sizeof(line));
    else
      std::memcpy(out, line, count * sizeof(Element));
  }
}

template <typename Element>
void multiply_panels(const Linear& layer) {
  const int64_t strips = strips_of(layer.num_rows), panels = (layer.out_features + kLanes - 1) / kLanes;
  std::atomic<int64_t> next_strip{0}, next_panel{0};
#pragma omp parallel if (layer.num_rows * layer.in_features * layer.out_features >= kWorthThreads)
  {
    for (int64_t strip; (strip = next_strip++) < strips;) pack_strip<Element>(layer, strip, layer.strips);
#pragma omp barrier
    const int64_t size = layer.num_rows * kLanes;  // 64 bytes a row
    std::unique_ptr<float[]> sums(new float[layer.gate ? 2 * size : size]);
    for (int64_t panel; (panel = next_panel++) < panels;) {
      const int64_t first = panel * kLanes;
      float* gates = sums.get() + size;
      multiply_panel<Element>(layer, {layer.weight, layer.weight_stride}, layer.strips, first, sums.get());
      if (layer.gate) multiply_panel<Element>(layer, {layer.gate, layer.gate_stride}, layer.strips, first, gates);
      store_panel<Element>(layer, first, sums.get(), gates);
    }
  }
}

void linear_layer(const Linear& layer) {
  if (layer.dtype == kFloat32) return multiply_panels<float>(layer);
#ifdef BATCHKV_IN_TILES
  multiply_in_tiles({{layer}}, [](int64_t, int64_t) {});
#else
  multiply_panels<uint16_t>(layer);
#endif
}

// All rows of a layer by `make_rows(first, last)`, before the layer is computed.
template <typename MakeRows>
void make_all_rows(const Linear& layer, const MakeRows& make_rows) {
#pragma omp parallel for schedule(static) if (layer.num_rows * layer.in_features >= kWorthThreads)
  for (int64_t row = 0; row < layer.num_rows; row++) make_rows(row, row + 1);
}

// Three layers of the same rows, which `make_rows(first, last)` makes, of one dtype; they may have the same strips.
template <typename MakeRows>
void linear_layers(const Linear& first, const Linear& second, const Linear& third, const MakeRows& make_rows) {
#ifdef BATCHKV_IN_TILES
  if (first.dtype != kFloat32) return multiply_in_tiles({{first}, {second}, {third}}, make_rows);
#endif
  make_all_rows(first, make_rows);
  for (const Linear* layer : {&first, &second, &third}) linear_layer(*layer);
}

// A layer with a gate, whose rows `make_rows(first, last)` makes, and one that reads what it gives, with strips of its own.
// The results of the first are in its `out` afterwards, or nowhere.
template <typename MakeRows>
void gated_mlp(const Linear& gated, const Linear& down, const MakeRows& make_rows) {
#ifdef BATCHKV_IN_TILES
  if (gated.dtype != kFloat32 && gated.out_features % kTileDepth == 0) return multiply_mlp_in_tiles(gated, down, make_rows);
#endif
  make_all_rows(gated, make_rows);
  linear_layer(gated);
  linear_layer(down);
}

}  // namespace ISA
