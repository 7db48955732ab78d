// Linear layers in bf16 by tiles (tiles.h).
//
// The weight is the left side, so its tiles are read where they lie, and what comes out is transposed: [output features]
// [rows]. First the rows are brought into right tiles, 16 of them a strip. Then a task is a panel: 32 output features for
// all rows, two strips at a time: four tiles of sums, for which each tile that is loaded is used twice.

namespace ISA {

constexpr int kPanel = 2 * kTile;     // output features of a task
constexpr int kTilesOfPart = 16;      // most tiles in a row of a panel that are multiplied before the next strips are

// What all tasks of a layer share.
struct TiledLinear {
  const Linear& layer;
  int64_t tiles = tiles_in(layer.in_features, kTileDepth);  // in a row of the weight
  int64_t strips = tiles_in(layer.num_rows, kTile);
  char* rows = reinterpret_cast<char*>(layer.strips);       // [strip][tile]

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

  int64_t panels() const { return tiles_in(layer.out_features, kPanel); }

  // The weight of a panel: where it lies, or, where that are not whole tiles, in `copied`, filled up with zeros.
  LeftTiles weight_of(int64_t panel, std::vector<uint16_t>& copied) const {
    const int64_t depth = layer.in_features, first = panel * kPanel;
    const auto* weight = static_cast<const uint16_t*>(layer.weight) + first * layer.weight_stride;
    const int64_t count = std::min<int64_t>(kPanel, layer.out_features - first);
    if (count == kPanel && depth % kTileDepth == 0) return {weight, layer.weight_stride * 2};
    copied.assign(kPanel * tiles * kTileDepth, 0);
    for (int64_t r = 0; r < count; r++)
      std::memcpy(&copied[r * tiles * kTileDepth], weight + r * layer.weight_stride, depth * sizeof(uint16_t));
    return {copied.data(), tiles * kTileDepth * 2};
  }
};

// Adds to the sums of `kStrips` strips, [kStrips][2] tiles, `count` tiles of the weight and of the rows.
template <int kStrips>
inline void multiply_tiles(LeftTiles weight, int64_t first, int64_t count, const char* rows, int64_t strip_bytes,
                           bool is_first, float* sums, const char* next) {
  char* at = reinterpret_cast<char*>(sums);
  if (is_first) {
    zero_sums<2, kStrips>();
  } else {
    _tile_loadd(0, at, kTileRowBytes);
    _tile_loadd(1, at + kTileBytes, kTileRowBytes);
    if constexpr (kStrips == 2) {
      _tile_loadd(2, at + 2 * kTileBytes, kTileRowBytes);
      _tile_loadd(3, at + 3 * kTileBytes, kTileRowBytes);
    }
  }
  for (int64_t tile = first; tile < first + count; tile++) {
    const char* right = rows + tile * kTileBytes;
    add_products<2, kStrips>(weight.at(0, tile * kTileDepth), weight.stride, weight.at(kTile, tile * kTileDepth),
                             weight.stride, right, right + strip_bytes, kTileRowBytes);
    if (next)
      for (int line = 0; line < 4; line++, next += 64) __builtin_prefetch(next, 0, 2);
  }
  store_sums<2, kStrips>(at, 2 * kTileBytes);
}

// A strip's sums, [2][output feature][row], to rows of `out`, of which there are `rows` with `width` features.
inline void store_strip(const float* sums, Vec low_bias, Vec high_bias, uint16_t* out, int64_t stride, int64_t rows,
                        int64_t width) {
  Vec low[kTile], high[kTile];
#pragma GCC unroll 16
  for (int i = 0; i < kTile; i++) low[i] = load(sums + i * kTile);
  transpose(low);
#pragma GCC unroll 16
  for (int i = 0; i < kTile; i++) high[i] = load(sums + kTileFloats + i * kTile);
  transpose(high);
  const __mmask32 features = width == kPanel ? ~0u : (1u << width) - 1;
#pragma GCC unroll 16
  for (int r = 0; r < kTile; r++)
    if (r < rows) {
      const __m512bh line = _mm512_cvtne2ps_pbh(high[r] + high_bias, low[r] + low_bias);
      _mm512_mask_storeu_epi16(out + r * stride, features, reinterpret_cast<const __m512i&>(line));
    }
}

inline void multiply_panel(const TiledLinear& tiled, int64_t panel, const char* next, std::vector<uint16_t>& copied,
                           float* sums) {
  const Linear& layer = tiled.layer;
  const LeftTiles weight = tiled.weight_of(panel, copied);
  const int64_t first = panel * kPanel, width = std::min<int64_t>(kPanel, layer.out_features - first);
  alignas(64) uint16_t biases[kPanel] = {};
  if (layer.bias)
    std::memcpy(biases, static_cast<const uint16_t*>(layer.bias) + first, width * sizeof(uint16_t));
  const Vec low_bias = load_floats(biases), high_bias = load_floats(biases + kTile);
  finish_writing();

  const int64_t parts = tiles_in(tiled.tiles, kTilesOfPart), strip_bytes = tiled.tiles * kTileBytes;
  const char* end = next ? next + kPanel * layer.weight_stride * 2 : nullptr;
  for (int64_t part = 0, tile = 0; part < parts; part++) {
    const int64_t count = (tiled.tiles - tile) / (parts - part);
    for (int64_t strip = 0; strip < tiled.strips; strip += 2) {
      float* block = sums + strip * 2 * kTileFloats;
      const char* rows = tiled.rows + strip * strip_bytes;
      const bool both = strip + 1 < tiled.strips;
      (both ? multiply_tiles<2> : multiply_tiles<1>)(weight, tile, count, rows, strip_bytes, part == 0, block, next);
      if (next && (next += count * 4 * 64) >= end) next = nullptr;
      if (part + 1 < parts) continue;
      for (int64_t s = strip; s <= strip + both; s++, block += 2 * kTileFloats)
        store_strip(block, low_bias, high_bias, static_cast<uint16_t*>(layer.out) + s * kTile * layer.out_features + first,
                    layer.out_features, layer.num_rows - s * kTile, width);
    }
    tile += count;
  }
}

inline void multiply_in_tiles(const Linear& layer) {
  const TiledLinear tiled{layer};
  const int64_t panels = tiled.panels();
  std::atomic<int64_t> next_strip{0}, next_panel{0};
#pragma omp parallel if (layer.num_rows * layer.in_features * layer.out_features >= kWorthThreads)
  {
    for (int64_t strip; (strip = next_strip++) < tiled.strips;) tiled.pack_strip(strip);
#pragma omp barrier
    const Tiles tiles;
    std::vector<uint16_t> copied;
    static thread_local Room room;
    float* sums;
    room.divide({(tiled.strips + 1) * 2 * kTileFloats}, {&sums});
    for (int64_t panel = next_panel++, next; panel < panels; panel = next) {
      next = next_panel++;
      const auto* weight = static_cast<const uint16_t*>(layer.weight);
      multiply_panel(tiled, panel,
                     next < panels ? reinterpret_cast<const char*>(weight + next * kPanel * layer.weight_stride) : nullptr,
                     copied, sums);
    }
  }
}

}  // namespace ISA
