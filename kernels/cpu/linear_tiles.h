// Linear layers in bf16 by tiles (tiles.h).
//
// The weight is the left side, so its tiles are read where they lie, and what comes out is transposed: [output features]
// [rows]. First the rows are brought into right tiles, 16 of them a strip. Then a task is a panel: two left tiles of the
// weight, or one of the weight and one of the gate, for a block of rows that stays in the second cache, two strips at a
// time: four tiles of sums, for which each tile that is loaded is used twice. Layers of the same rows share their strips.
// What comes out as [output features][rows] is nearly what the next layer's right tiles are: a layer whose results only
// that one reads writes those.

namespace ISA {

constexpr int64_t kBlockBytes = 800 << 10;  // most bytes of strips that are multiplied by all panels before the others are
constexpr int kTilesOfPart = 12;            // most tiles in a row of a panel that are multiplied before the next strips are

// What all tasks of a layer share.
struct TiledLinear {
  const Linear& layer;
  int64_t tiles = tiles_in(layer.in_features, kTileDepth);  // in a row of the weight
  int64_t strips = tiles_in(layer.num_rows, kTile);
  char* rows = reinterpret_cast<char*>(layer.strips);       // [strip][tile]
  char* next_rows = nullptr;                                // those of the next layer, to be written instead of `out`

  void pack_strip(int64_t strip) const {
    const int64_t depth = layer.in_features;
    const auto* all_rows = static_cast<const uint16_t*>(layer.rows);
    for (int64_t tile = 0; tile < tiles; tile++) {
      const int64_t count = std::min<int64_t>(kTileDepth, depth - tile * kTileDepth);
      Vec pairs[kTile] = {};
      for (int r = 0; r < kTile; r++) {
        const int64_t row = std::min(strip * kTile + r, layer.num_rows - 1);  // the last one again makes strips whole
        const uint16_t* from = all_rows + row * depth + tile * kTileDepth;
        if (count == kTileDepth)
          std::memcpy(&pairs[r], from, sizeof(Vec));
        else
          std::memcpy(&pairs[r], from, count * sizeof(uint16_t));
      }
      pack_right_tile(pairs, rows + (strip * tiles + tile) * kTileBytes);
    }
  }

  // An even number.
  int64_t strips_of_block() const {
    const int64_t blocks = tiles_in(strips * tiles * kTileBytes, kBlockBytes);
    return tiles_in(tiles_in(strips, blocks), 2) * 2;
  }

  int64_t features_of_panel() const { return layer.gate ? kTile : 2 * kTile; }
  int64_t panels() const { return tiles_in(layer.out_features, features_of_panel()); }

  // Where the two halves of a panel begin: in the weight, or in gate and weight.
  const uint16_t* half(int64_t panel, int which) const {
    const auto* weight = static_cast<const uint16_t*>(layer.weight);
    if (!layer.gate) return weight + (2 * panel + which) * kTile * layer.weight_stride;
    return which ? weight + panel * kTile * layer.weight_stride
                 : static_cast<const uint16_t*>(layer.gate) + panel * kTile * layer.gate_stride;
  }
  int64_t stride_of(int which) const { return layer.gate && !which ? layer.gate_stride : layer.weight_stride; }

  // The left tiles of a half: where they lie, or, where that are not whole tiles, in `copied`, filled up with zeros.
  LeftTiles left_tiles(int64_t panel, int which, std::vector<uint16_t>& copied) const {
    const int64_t depth = layer.in_features, stride = stride_of(which);
    const int64_t first = layer.gate ? panel * kTile : (2 * panel + which) * kTile;
    const int64_t count = std::min<int64_t>(kTile, layer.out_features - first);
    const uint16_t* from = half(panel, which);
    if (count == kTile && depth % kTileDepth == 0) return {from, stride * 2};
    copied.assign(kTile * tiles * kTileDepth, 0);
    for (int64_t r = 0; r < count; r++)
      std::memcpy(&copied[r * tiles * kTileDepth], from + r * stride, depth * sizeof(uint16_t));
    return {copied.data(), tiles * kTileDepth * 2};
  }
};

// The transpose of a tile of sums.
struct Square {
  Vec lines[kTile];

  explicit Square(const float* sums) {
#pragma GCC unroll 16
    for (int i = 0; i < kTile; i++) lines[i] = load(sums + i * kTile);
    transpose(lines);
  }
};

// A strip's sums, [2][output feature][row], with their biases, to `rows` rows of `out`, of which `width` features are there.
inline void store_strip(const float* sums, Vec low_bias, Vec high_bias, uint16_t* out, int64_t stride, int64_t rows,
                        int64_t width) {
  const Square low(sums), high(sums + kTileFloats);
  const __mmask32 features = width == 2 * kTile ? ~0u : (1u << width) - 1;
#pragma GCC unroll 16
  for (int r = 0; r < kTile; r++)
    if (r < rows) {
      const __m512bh line = _mm512_cvtne2ps_pbh(high.lines[r] + high_bias, low.lines[r] + low_bias);
      _mm512_mask_storeu_epi16(out + r * stride, features, reinterpret_cast<const __m512i&>(line));
    }
}

// The same for what went through a gate, [output feature][row].
inline void store_gated_strip(const float* sums, uint16_t* out, int64_t stride, int64_t rows, int64_t width) {
  const Square square(sums);
  const __mmask16 features = (1u << width) - 1;
#pragma GCC unroll 16
  for (int r = 0; r < kTile; r++)
    if (r < rows) {
      const __m256bh line = _mm512_cvtneps_pbh((__m512)square.lines[r]);
      _mm256_mask_storeu_epi16(out + r * stride, features, reinterpret_cast<const __m256i&>(line));
    }
}

// The same to the tiles of the next layer's rows, in which neighbours are pairs: 16 features are half a tile.
inline void store_gated_tile(const float* sums, char* tile) {
  for (int i = 0; i < kTile; i += 2)
    store_pairs(load(sums + i * kTile), load(sums + (i + 1) * kTile), tile + i / 2 * kTileRowBytes);
}

// Up to two strips of a panel whose products are there and have to be brought to `out`. Where there is a gate, that is done
// while the next strips are multiplied: tiles and vectors are different units of a processor.
struct Results {
  const TiledLinear& tiled;
  int64_t panel;
  int64_t first = 0, last = 0;  // strips
  float* sums = nullptr;        // [strip][2][output feature][row], with a gate its sums first
  int ungated = 0;              // vectors of output features that have to go through the gate

  void begin(int64_t first_strip, int64_t last_strip, float* of_strips) {
    first = first_strip, last = last_strip, sums = of_strips;
    ungated = tiled.layer.gate ? (last - first) * kTile : 0;
  }

  void gate_some() {
    for (int i = 0; i < 4 && ungated; i++) {
      ungated--;
      float* gate = sums + ungated / kTile * 2 * kTileFloats + ungated % kTile * kTile;
      store(gate, gated<uint16_t>(tiled.layer.activation, load(gate), load(gate + kTileFloats)));
    }
  }

  void finish() {
    while (ungated) gate_some();
    for (; first < last; first++, sums += 2 * kTileFloats) store_first();
  }

  void store_first() const {
    const Linear& layer = tiled.layer;
    const int64_t feature = panel * tiled.features_of_panel(), rows = layer.num_rows - first * kTile;
    const int64_t width = std::min<int64_t>(tiled.features_of_panel(), layer.out_features - feature);
    if (tiled.next_rows) {
      const int64_t tile = first * (layer.out_features / kTileDepth) + feature / kTileDepth;
      return store_gated_tile(sums, tiled.next_rows + tile * kTileBytes + feature % kTileDepth / 2 * kTileRowBytes);
    }
    uint16_t* out = static_cast<uint16_t*>(layer.out) + first * kTile * layer.out_features + feature;
    if (layer.gate) return store_gated_strip(sums, out, layer.out_features, rows, width);
    alignas(64) uint16_t biases[2 * kTile] = {};
    if (layer.bias)
      std::memcpy(biases, static_cast<const uint16_t*>(layer.bias) + feature, width * sizeof(uint16_t));
    store_strip(sums, load_floats(biases), load_floats(biases + kTile), out, layer.out_features, rows, width);
  }
};

// The next panel, which is asked for while this one is multiplied.
struct NextPanel {
  const char* halves[2] = {};
  int64_t lines = 0;       // of a half that have not been asked for
  int64_t step_lines = 0;  // of them with each step

  NextPanel() = default;
  NextPanel(const TiledLinear& tiled, int64_t panel) {
    for (int which : {0, 1}) halves[which] = reinterpret_cast<const char*>(tiled.half(panel, which));
    lines = kTile * tiled.layer.in_features * sizeof(uint16_t) / 64;
    step_lines = tiles_in(lines, tiled.tiles * tiles_in(tiled.strips_of_block(), 2));
  }

  void fetch_some() {
    if (lines <= 0) return;
    for (const char*& line : halves)
      for (int64_t i = 0; i < step_lines; i++, line += 64) __builtin_prefetch(line, 0, 2);
    lines -= step_lines;
  }
};

// Adds to the sums of `kStrips` strips, [kStrips][2] tiles, the products of the tiles [first, last) of the weight and of the
// rows, and does what is to be done meanwhile.
template <int kStrips>
inline void multiply_tiles(const LeftTiles (&halves)[2], int64_t first, int64_t last, const char* rows, int64_t strip_bytes,
                           float* sums, Results& results, NextPanel& next) {
  if (first == 0)
    zero_sums<2 * kStrips>();
  else
    load_sums<2 * kStrips>(sums);
  const auto& [low, high] = halves;
  for (int64_t tile = first; tile < last; tile++) {
    const char* right = rows + tile * kTileBytes;
    add_products<kStrips>(low.at(0, tile * kTileDepth), low.stride, high.at(0, tile * kTileDepth), high.stride, right,
                          right + strip_bytes);
    next.fetch_some();
    results.gate_some();
  }
  store_sums<2 * kStrips>(sums);
}

// The strips [begin, end) by a panel. `sums` has room for them, [strip][2] tiles.
inline void multiply_panel(const TiledLinear& tiled, int64_t panel, const LeftTiles (&halves)[2], int64_t begin, int64_t end,
                           NextPanel& next, float* sums) {
  const int64_t parts = tiles_in(tiled.tiles, kTilesOfPart), strip_bytes = tiled.tiles * kTileBytes;
  Results results{tiled, panel};
  for (int64_t part = 0, tile = 0; part < parts; part++) {
    const int64_t last = tile + (tiled.tiles - tile) / (parts - part);
    float* at = sums;
    for (int64_t strip = begin; strip < end; strip += 2, at += 4 * kTileFloats) {
      const bool both = strip + 1 < end;
      (both ? multiply_tiles<2> : multiply_tiles<1>)(halves, tile, last, tiled.rows + strip * strip_bytes, strip_bytes, at,
                                                     results, next);
      if (part + 1 < parts) continue;
      results.finish();
      results.begin(strip, strip + 1 + both, at);
      if (!tiled.layer.gate) results.finish();
    }
    tile = last;
  }
  results.finish();
}

// Layers of the same rows, with what their tasks are: all panels of all layers for a block of rows, then for the next.
class TiledLinears {
 public:
  explicit TiledLinears(std::initializer_list<TiledLinear> layers) : layers_(layers) {
    for (const TiledLinear& tiled : layers_) panels_ += tiled.panels();
    block_ = layers_[0].strips_of_block();
    tasks_ = panels_ * tiles_in(layers_[0].strips, block_);
  }

  // For all threads of a team.
  template <typename MakeRows>
  void pack(const MakeRows& make_rows) {
    const TiledLinear& tiled = layers_[0];
    for (int64_t strip; (strip = next_strip_++) < tiled.strips;) {
      make_rows(strip * kTile, std::min((strip + 1) * kTile, tiled.layer.num_rows));
      tiled.pack_strip(strip);
    }
  }

  // For all threads of a team, when all strips are there.
  void multiply() {
    const Tiles tiles;
    std::vector<uint16_t> copied[2];
    static thread_local Room room;
    float* sums;
    room.divide({(block_ + 1) * 2 * kTileFloats}, {&sums});
    const int64_t side_by_side = layers_[0].layer.gate ? 2 : 1;  // of a thread, so that results are whole cache lines
    for (int64_t task = next_task_.fetch_add(side_by_side), next; task < tasks_; task = next) {
      next = (task + 1) % side_by_side ? task + 1 : next_task_.fetch_add(side_by_side);
      const auto [tiled, panel] = panel_of(task);
      const int64_t begin = task / panels_ * block_;
      const LeftTiles halves[] = {tiled.left_tiles(panel, 0, copied[0]), tiled.left_tiles(panel, 1, copied[1])};
      finish_writing();
      NextPanel ahead;
      if (next < tasks_) ahead = NextPanel(panel_of(next).tiled, panel_of(next).panel);
      multiply_panel(tiled, panel, halves, begin, std::min(begin + block_, tiled.strips), ahead, sums);
    }
  }

 private:
  struct Panel {
    const TiledLinear& tiled;
    int64_t panel;
  };

  Panel panel_of(int64_t task) const {
    int64_t panel = task % panels_;
    size_t i = 0;
    for (; panel >= layers_[i].panels(); i++) panel -= layers_[i].panels();
    return {layers_[i], panel};
  }

  const std::vector<TiledLinear> layers_;
  int64_t panels_ = 0, block_, tasks_;
  std::atomic<int64_t> next_strip_{0}, next_task_{0};
};

inline bool is_worth_threads(const Linear& layer) {
  return layer.num_rows * layer.in_features * layer.out_features >= kWorthThreads;
}

// Layers of the same rows, which `make_rows(first, last)` makes.
template <typename MakeRows>
void multiply_in_tiles(std::initializer_list<TiledLinear> layers, const MakeRows& make_rows) {
  const Linear& first = layers.begin()->layer;
  if (first.num_rows == 0) return;
  TiledLinears linears(layers);
#pragma omp parallel if (is_worth_threads(first))
  {
    linears.pack(make_rows);
#pragma omp barrier
    linears.multiply();
  }
}

// A layer with a gate and the one that reads it, whose strips are others.
template <typename MakeRows>
void multiply_mlp_in_tiles(const Linear& gated, const Linear& down, const MakeRows& make_rows) {
  if (gated.num_rows == 0) return;
  TiledLinear before{gated};
  const TiledLinear after{down};
  before.next_rows = after.rows;
  TiledLinears first({before}), second({after});
#pragma omp parallel if (is_worth_threads(gated))
  {
    first.pack(make_rows);
#pragma omp barrier
    first.multiply();
#pragma omp barrier
    second.multiply();
  }
}

}  // namespace ISA
