// Products of bf16 matrices in tiles (AMX), for instruction sets that have them; on top of vectors.h.
//
// One instruction adds to a tile of sums, [16 rows][16 columns] in fp32, the product of two tiles: `left` has 16 rows of 32
// numbers, `right` 32 rows of 16 numbers, of which two rows lie as one, number beside number: [16][16 columns][2]. So the
// numbers of the right side that are multiplied with neighbours of a left row are neighbours too, as they are in the columns
// of a matrix whose transpose is stored: what is stored as [column][32 numbers] becomes a right tile by a transposition of
// its pairs.

namespace ISA {

constexpr int kTile = 16;       // rows of a tile, and columns of a right tile and of sums
constexpr int kTileDepth = 32;  // numbers in a row of a left tile
constexpr int kTileFloats = kTile * kTile;
constexpr int kTileBytes = 1024;
constexpr int kTileRowBytes = 64;

inline int64_t tiles_in(int64_t size, int64_t of) { return (size + of - 1) / of; }

// Sets the processor up for whole tiles, as long as it lives; each thread for itself.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    for (int tile = 0; tile < 8; tile++) shapes.row_bytes[tile] = kTileRowBytes, shapes.rows[tile] = kTile;
    _tile_loadconfig(&shapes);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// What was written to memory is there before a tile is loaded: compilers do not know that tiles read it.
inline void finish_writing() { asm volatile("" ::: "memory"); }

// A matrix of bf16 whose rows are `stride` bytes apart, from a row and a number on.
struct LeftTiles {
  const void* base;
  int64_t stride;
  const char* at(int64_t row, int64_t depth) const {
    return static_cast<const char*>(base) + row * stride + depth * sizeof(uint16_t);
  }
};

typedef uint16_t VecHalf2 __attribute__((vector_size(4 * VECTOR_FLOATS)));  // a row of a tile

// 16 pairs of bf16 from each of 16 rows, whose transposition is a right tile.
inline void pack_right_tile(const Vec (&rows)[kTile], void* tile) {
  Vec square[kTile];
#pragma GCC unroll 16
  for (int r = 0; r < kTile; r++) square[r] = rows[r];
  transpose(square);
#pragma GCC unroll 16
  for (int r = 0; r < kTile; r++) std::memcpy(static_cast<char*>(tile) + r * kTileRowBytes, &square[r], kTileRowBytes);
}

// Two numbers for each column, rounded, side by side: a row of a right tile.
inline void store_pairs(Vec even, Vec odd, void* to) {
  const VecHalf2 side_by_side = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512bh halves = _mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16((__m512i)side_by_side, (__m512i)halves));
}

// Sums are in the tiles 0 to kTiles - 1, of at most 4.
template <int kTiles>
inline void zero_sums() {
  _tile_zero(0);
  if constexpr (kTiles > 1) _tile_zero(1);
  if constexpr (kTiles > 2) _tile_zero(2);
  if constexpr (kTiles > 3) _tile_zero(3);
}

// In memory they lie one after the other.
template <int kTiles>
inline void load_sums(const float* from) {
  _tile_loadd(0, from, kTileRowBytes);
  if constexpr (kTiles > 1) _tile_loadd(1, from + kTileFloats, kTileRowBytes);
  if constexpr (kTiles > 2) _tile_loadd(2, from + 2 * kTileFloats, kTileRowBytes);
  if constexpr (kTiles > 3) _tile_loadd(3, from + 3 * kTileFloats, kTileRowBytes);
}

template <int kTiles>
inline void store_sums(float* to) {
  _tile_stored(0, to, kTileRowBytes);
  if constexpr (kTiles > 1) _tile_stored(1, to + kTileFloats, kTileRowBytes);
  if constexpr (kTiles > 2) _tile_stored(2, to + 2 * kTileFloats, kTileRowBytes);
  if constexpr (kTiles > 3) _tile_stored(3, to + 3 * kTileFloats, kTileRowBytes);
}

// Adds to the sums the products of one or two right tiles with two left ones: those of the first right tile, then of the
// second. Each tile that is loaded is used for all.
template <int kRights>
inline void add_products(const char* left0, int64_t stride0, const char* left1, int64_t stride1, const void* right0,
                         const void* right1) {
  _tile_loadd(4, left0, stride0);
  _tile_loadd(6, right0, kTileRowBytes);
  _tile_dpbf16ps(0, 4, 6);
  _tile_loadd(5, left1, stride1);
  _tile_dpbf16ps(1, 5, 6);
  if constexpr (kRights == 2) {
    _tile_loadd(7, right1, kTileRowBytes);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

}  // namespace ISA
