// The kernel by tiles (tiles.h), for pages of bf16 with values side by side.
//
// Everything is computed transposed, so that keys and values are the left sides and are read where they lie: scores are
// [keys][rows], and what has been weighed is [dims][rows]. A vector holds 16 rows, a strip: a softmax needs no sums across
// it. Weights are rounded to bf16 for the product with the values.

namespace ISA {

constexpr int kStrip = kTile;                     // rows of a vector
constexpr int kChunks = kBlock / kTileDepth;      // parts of a block's keys that a left tile of values has
constexpr float kLog2E = 1.44269504088896341f;

inline Vec larger(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }  // b if one is NaN

// 2^x for x <= 0 within 3e-6 of it (a fit with 1 at 0); 0 below -126, where floats lose digits and processors time.
inline Vec exp2_nonpositive(Vec x) {
  const Vec round = all(12582912.0f);  // 1.5 * 2^23: adding it leaves the integer in the low bits
  const Vec n = (x + round) - round, r = x - n;
  Vec p = all(0.009582852944731712f);
  p = p * r + 0.055906426161527634f;
  p = p * r + 0.24024099111557007f;
  p = p * r + 0.6931241750717163f;
  p = p * r + 1.0f;
  const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, (__m512)all(-126), _CMP_NLE_UQ);  // NaN stays
  return (Vec)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)n);
}

struct TileAttention : Task {
  using Setup = Tiles;
  // Rows are (query, head) with the heads of a query side by side; there is a strip more than they need, as a run may begin
  // at any of them.
  struct Scratch {
    float *query, *scores, *weights, *weighed, *out, *max, *sum, *factor, *from, *to, *keys, *values;
    int64_t rows;  // between one number of a row and its next one
    Room room;

    void resize(int64_t num_rows, const Pages& pages) {
      rows = (tiles_in(num_rows, kStrip) + 1) * kStrip;
      const int64_t width = pages.value_stride;
      room.divide({rows * pages.key_dim / 2, rows * kBlock, rows * kBlock / 2, rows * width, rows * width, rows, rows, rows,
                   rows, rows, kBlock * pages.key_dim / 2, kBlock * width / 2},
                  {&query, &scores, &weights, &weighed, &out, &max, &sum, &factor, &from, &to, &keys, &values});
      std::fill_n(query, rows * pages.key_dim / 2, 0.0f);
      std::fill_n(out, rows * width, 0.0f);
      std::fill_n(max, rows, -INFINITY);
      std::fill_n(sum, rows, 0.0f);
    }
  };
  Scratch& scratch;

  void begin() {
    const int64_t rows = (last - first) * group;
    scratch.resize(rows, pages);
    for (int64_t r = 0; r < scratch.rows; r++) {
      const int64_t token = first + std::min(r / group, last - first - 1);
      reinterpret_cast<int32_t*>(scratch.from)[r] = from(token);
      reinterpret_cast<int32_t*>(scratch.to)[r] = to(token);
    }
    for (int64_t row = 0; row < rows; row += kStrip)
      for (int d = 0; d < pages.key_dim; d += kTileDepth) load_queries(row, std::min<int64_t>(kStrip, rows - row), d);
  }

  // 32 dims of the queries of a strip, as a right tile.
  void load_queries(int64_t row, int64_t rows, int dim) {
    Vec pairs[kTile] = {};
    for (int64_t r = 0; r < rows; r++)
      std::memcpy(&pairs[r], of<const uint16_t>(query, first + (row + r) / group, head * group + (row + r) % group) + dim,
                  kTileRowBytes);
    pack_right_tile(pairs, scratch.query + dim / 2 * scratch.rows + row, scratch.rows * sizeof(float));
  }

  void attend_run(int64_t block, int64_t begin, int64_t end, int64_t lo, int64_t hi) {
    const int64_t row = (begin - first) * group, rows = (end - begin) * group, strips = tiles_in(rows, kStrip);
    const int first_group = (lo - block) / kTile, last_group = (hi - 1 - block) / kTile;
    score_keys(begin, block, lo, hi, row, strips);
    finish_writing();
    for (int64_t s = 0; s < strips; s++)
      softmax(block, first_group, last_group, row + s * kStrip, lanes_of(rows - s * kStrip), s);
    weigh_values(begin, block, lo, hi, strips);
    finish_writing();
    for (int64_t s = 0; s < strips; s++) add_weighed(row + s * kStrip, lanes_of(rows - s * kStrip), s);
  }

  static __mmask16 lanes_of(int64_t rows) { return rows >= kStrip ? 0xffff : (1 << rows) - 1; }

  // Scores of the rows of some strips with the groups of 16 keys that [lo, hi) is in; those with other keys are anything.
  void score_keys(int64_t token, int64_t block, int64_t lo, int64_t hi, int64_t row, int64_t strips) {
    LeftTiles keys[kGroups] = {};
    const int first_group = (lo - block) / kTile, last_group = (hi - 1 - block) / kTile;
    for (int g = first_group; g <= last_group; g++)
      keys[g] = keys_of(token, block + g * kTile, std::max(lo, block + g * kTile), std::min(hi, block + (g + 1) * kTile));
    finish_writing();
    for (int64_t s = 0; s < strips; s += 2)
      for (int g = first_group; g <= last_group; g += 2) {
        const auto score = g < last_group ? (s + 1 < strips ? &TileAttention::score<2, 2> : &TileAttention::score<2, 1>)
                                          : (s + 1 < strips ? &TileAttention::score<1, 2> : &TileAttention::score<1, 1>);
        (this->*score)(keys + g, scratch.query + row + s * kStrip, scratch.scores + (s * kGroups + g) * kTileFloats);
      }
  }

  // The 16 keys from `begin` on, of which [lo, hi) are there.
  LeftTiles keys_of(int64_t token, int64_t begin, int64_t lo, int64_t hi) const {
    const int64_t size = pages.page_size, bytes = pages.key_dim * sizeof(uint16_t);
    if (size % kTile == 0) return {key_page(token, lo) + begin % size * bytes, bytes};
    char* copy = reinterpret_cast<char*>(scratch.keys) + begin % kBlock * bytes;
    for (int64_t p = lo; p < hi; p++) std::memcpy(copy + (p - begin) * bytes, key_page(token, p) + p % size * bytes, bytes);
    return {copy, bytes};
  }

  template <int kKeyTiles, int kStrips>
  void score(const LeftTiles* keys, const float* query, float* scores) {
    const int64_t stride = scratch.rows * sizeof(float);
    const LeftTiles &low = keys[0], &high = keys[kKeyTiles - 1];
    zero_sums<kKeyTiles, kStrips>();
    for (int d = 0; d < pages.key_dim; d += kTileDepth, query += kTile * scratch.rows)
      add_products<kKeyTiles, kStrips>(low.at(0, d), low.stride, high.at(0, d), high.stride, query, query + kStrip, stride);
    store_sums<kKeyTiles, kStrips>(reinterpret_cast<char*>(scores), kGroups * kTileBytes);
  }

  // Turns the scores of a strip into weights, a right tile for each chunk of keys; 0 for keys that a row does not see.
  void softmax(int64_t block, int first_group, int last_group, int64_t row, __mmask16 lanes, int64_t strip) {
    float* scores = scratch.scores + strip * kGroups * kTileFloats;
    const int begin = first_group * kTile, end = (last_group + 1) * kTile;
    if (scoring.softcap > 0) cap(scores + begin * kStrip, (end - begin) * kStrip);
    const float scale = scoring.softcap > 0 ? kLog2E : scoring.scale * kLog2E;
    const Vec before = load(scratch.max + row);
    Vec most = all(-INFINITY);
    VecInt from, to;
    std::memcpy(&from, scratch.from + row, sizeof(from));
    std::memcpy(&to, scratch.to + row, sizeof(to));
    const int64_t all_from = _mm512_mask_reduce_max_epi32(lanes, (__m512i)from);
    const int64_t all_to = _mm512_mask_reduce_min_epi32(lanes, (__m512i)to);
    for (int g = first_group; g <= last_group; g++) {
      const int32_t position = block + g * kTile;
      const bool all_see = all_from <= position && position + kTile <= all_to;
      float* at = scores + g * kTileFloats;
      if (!all_see)
        for (int i = 0; i < kTile; i++)
          store(at + i * kStrip,
                (from <= position + i) & (position + i < to) ? load(at + i * kStrip) : all(-INFINITY));
      for (int i = 0; i < kTile; i++) most = larger(load(at + i * kStrip), most);
    }
    most = larger(most * scale, before);

    Vec even_sum = {}, odd_sum = {};
    auto* weights = reinterpret_cast<char*>(scratch.weights) + strip * kChunks * kTileBytes;
    for (int i = begin; i < end; i += 2) {
      const Vec even = exp2_nonpositive(load(scores + i * kStrip) * scale - most);
      const Vec odd = exp2_nonpositive(load(scores + (i + 1) * kStrip) * scale - most);
      even_sum = even_sum + even;
      odd_sum = odd_sum + odd;
      store_pairs(even, odd, weights + i / 2 * kTileRowBytes);
    }
    if (first_group % 2) std::memset(weights + (begin - kTile) / 2 * kTileRowBytes, 0, kTileBytes / 2);
    if (last_group % 2 == 0) std::memset(weights + end / 2 * kTileRowBytes, 0, kTileBytes / 2);
    const Vec factor = exp2_nonpositive(before - most);  // 0 where there was nothing
    store(scratch.factor + strip * kStrip, factor);
    store_lanes(scratch.max + row, lanes, most);
    store_lanes(scratch.sum + row, lanes, load(scratch.sum + row) * factor + (even_sum + odd_sum));
  }

  void cap(float* scores, int64_t count) const {
    for (int64_t i = 0; i < count; i++)
      scores[i] = scoring.softcap * std::tanh(scores[i] * scoring.scale / scoring.softcap);
  }

  // Two numbers of each lane, rounded, side by side.
  static void store_pairs(Vec even, Vec odd, void* to) {
    const VecHalf2 side_by_side = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                   8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512bh halves = _mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16((__m512i)side_by_side, (__m512i)halves));
  }

  static void store_lanes(float* to, __mmask16 lanes, Vec value) { _mm512_mask_storeu_ps(to, lanes, (__m512)value); }

  // The values of the keys [lo, hi) by the weights, for each strip [value_stride][kStrip].
  void weigh_values(int64_t token, int64_t block, int64_t lo, int64_t hi, int64_t strips) {
    LeftTiles values[kChunks] = {};
    const int first_chunk = (lo - block) / kTileDepth, last_chunk = (hi - 1 - block) / kTileDepth;
    for (int c = first_chunk; c <= last_chunk; c++) {
      const int64_t begin = block + c * kTileDepth;
      values[c] = values_of(token, begin, std::max(lo, begin), std::min(hi, begin + kTileDepth));
    }
    finish_writing();
    const int64_t tiles = pages.value_stride / kTile;
    for (int64_t s = 0; s < strips; s += 2)
      for (int64_t d = 0; d < tiles; d += 2) {
        const auto weigh = d + 1 < tiles ? (s + 1 < strips ? &TileAttention::weigh<2, 2> : &TileAttention::weigh<2, 1>)
                                         : (s + 1 < strips ? &TileAttention::weigh<1, 2> : &TileAttention::weigh<1, 1>);
        (this->*weigh)(values, first_chunk, last_chunk, d * kTile, s);
      }
  }

  // The chunk of values from `begin` on: where they lie if all are there, else copied, with zeros outside [lo, hi).
  LeftTiles values_of(int64_t token, int64_t begin, int64_t lo, int64_t hi) const {
    const int64_t size = pages.page_size, width = pages.value_stride;
    if (size % kTileDepth == 0 && hi - lo == kTileDepth)
      return {value_page(token, begin) + begin % size * sizeof(uint16_t), size * static_cast<int64_t>(sizeof(uint16_t))};
    auto* copy = reinterpret_cast<uint16_t*>(scratch.values) + begin % kBlock / kTileDepth * width * kTileDepth;
    if (hi - lo < kTileDepth) std::memset(copy, 0, width * kTileRowBytes);
    for (int64_t p = lo; p < hi;) {
      const int64_t stop = std::min(hi, (p / size + 1) * size), count = stop - p;
      const auto* from = reinterpret_cast<const uint16_t*>(value_page(token, p)) + p % size;
      uint16_t* to = copy + p - begin;
      const __mmask32 there = count == kTileDepth ? ~0u : (1u << count) - 1;
      if (count == kTile)
        for (int64_t d = 0; d < width; d++) std::memcpy(to + d * kTileDepth, from + d * size, kTileRowBytes / 2);
      else
        for (int64_t d = 0; d < width; d++)
          _mm512_mask_storeu_epi16(to + d * kTileDepth, there, _mm512_maskz_loadu_epi16(there, from + d * size));
      p = stop;
    }
    return {copy, kTileRowBytes};
  }

  template <int kDimTiles, int kStrips>
  void weigh(const LeftTiles* values, int first_chunk, int last_chunk, int64_t dim, int64_t strip) {
    const int64_t strip_bytes = pages.value_stride * kStrip * sizeof(float);
    char* at = reinterpret_cast<char*>(scratch.weighed) + strip * strip_bytes + dim * kTileRowBytes;
    const char* weights = reinterpret_cast<const char*>(scratch.weights) + strip * kChunks * kTileBytes;
    zero_sums<kDimTiles, kStrips>();
    for (int c = first_chunk; c <= last_chunk; c++)
      add_products<kDimTiles, kStrips>(values[c].at(dim, 0), values[c].stride, values[c].at(dim + kTile, 0),
                                       values[c].stride, weights + c * kTileBytes, weights + (kChunks + c) * kTileBytes,
                                       kTileRowBytes);
    store_sums<kDimTiles, kStrips>(at, strip_bytes);
  }

  // Rescales what the rows of a strip have, and adds what was weighed.
  void add_weighed(int64_t row, __mmask16 lanes, int64_t strip) {
    const Vec factor = load(scratch.factor + strip * kStrip);
    const float* weighed = scratch.weighed + strip * pages.value_stride * kStrip;
    float* out = scratch.out + row;
    for (int d = 0; d < pages.value_stride; d++, out += scratch.rows, weighed += kStrip)
      store_lanes(out, lanes, load(out) * factor + load(weighed));
  }

  void finish() {
    const int64_t rows = (last - first) * group;
    for (int64_t row = 0; row < rows; row += kStrip) {
      const Vec scale = 1 / total(row);
      for (int d = 0; d < pages.value_dim; d += kTile) store_results(row, std::min<int64_t>(kStrip, rows - row), d, scale);
    }
  }

  // The sums of a strip, with the sinks. What was weighed is rescaled if a sink is larger than all scores.
  Vec total(int64_t row) {
    const Vec sum = load(scratch.sum + row), most = load(scratch.max + row);
    if (!scoring.sinks) return sum;
    Vec sink;
    for (int lane = 0; lane < kStrip; lane++) sink[lane] = scoring.sinks[head * group + (row + lane) % group] * kLog2E;
    const Vec largest = larger(sink, most), factor = exp2_nonpositive(most - largest);
    for (int d = 0; d < pages.value_stride; d++) {
      float* out = scratch.out + d * scratch.rows + row;
      store(out, load(out) * factor);
    }
    return sum * factor + exp2_nonpositive(sink - largest);
  }

  // 16 dims of the results of a strip.
  void store_results(int64_t row, int64_t rows, int dim, Vec scale) {
    Vec square[kTile];
#pragma GCC unroll 16
    for (int d = 0; d < kTile; d++) square[d] = load(scratch.out + (dim + d) * scratch.rows + row) * scale;
    transpose(square);
    const int count = std::min(kTile, pages.value_dim - dim);
    for (int64_t r = 0; r < rows; r++) {
      const __m256bh half = _mm512_cvtneps_pbh((__m512)square[r]);
      uint16_t* to = of<uint16_t>(out, first + (row + r) / group, head * group + (row + r) % group) + dim;
      std::memcpy(to, &half, count * sizeof(uint16_t));
    }
  }
};

}  // namespace ISA
