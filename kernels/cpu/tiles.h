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

// 16 pairs of bf16 from each of 16 rows, whose transposition is a right tile, with rows that are `stride` bytes apart.
inline void pack_right_tile(const Vec (&rows)[kTile], void* tile, int64_t stride = kTileRowBytes) {
  Vec square[kTile];
#pragma GCC unroll 16
  for (int r = 0; r < kTile; r++) square[r] = rows[r];
  transpose(square);
#pragma GCC unroll 16
  for (int r = 0; r < kTile; r++) std::memcpy(static_cast<char*>(tile) + r * stride, &square[r], kTileRowBytes);
}

// Sums of kLefts x kRights products, each 1 or 2, in the tiles 0 to 3: of the first right tile with both left ones, then of
// the second.
template <int kLefts, int kRights>
inline void zero_sums() {
  _tile_zero(0);
  if constexpr (kLefts == 2) _tile_zero(1);
  if constexpr (kRights == 2) _tile_zero(2);
  if constexpr (kLefts == 2 && kRights == 2) _tile_zero(3);
}

// Adds products to the sums. Each tile that is loaded is used for all; rows of right tiles are `stride` bytes apart.
template <int kLefts, int kRights>
inline void add_products(const char* left0, int64_t stride0, const char* left1, int64_t stride1, const void* right0,
                         const void* right1, int64_t stride) {
  _tile_loadd(4, left0, stride0);
  _tile_loadd(6, right0, stride);
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (kLefts == 2) {
    _tile_loadd(5, left1, stride1);
    _tile_dpbf16ps(1, 5, 6);
  }
  if constexpr (kRights == 2) {
    _tile_loadd(7, right1, stride);
    _tile_dpbf16ps(2, 4, 7);
  }
  if constexpr (kLefts == 2 && kRights == 2) _tile_dpbf16ps(3, 5, 7);
}

// Those of the second left tile go right behind, those of the second right one `distance` bytes behind.
template <int kLefts, int kRights>
inline void store_sums(char* at, int64_t distance) {
  _tile_stored(0, at, kTileRowBytes);
  if constexpr (kLefts == 2) _tile_stored(1, at + kTileBytes, kTileRowBytes);
  if constexpr (kRights == 2) _tile_stored(2, at + distance, kTileRowBytes);
  if constexpr (kLefts == 2 && kRights == 2) _tile_stored(3, at + distance + kTileBytes, kTileRowBytes);
}

}  // namespace ISA
