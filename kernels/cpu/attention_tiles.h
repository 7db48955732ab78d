// The kernel by tiles (tiles.h), for pages of bf16 with values side by side.
//
// Everything is computed transposed, so that keys and values are the left sides and are read where they lie: scores are
// [keys][rows], and what has been weighed is [dims][rows]. A vector holds 16 rows, a strip: a softmax needs no sums across
// it. Weights are rounded to bf16 for the product with the values.
//
// Strips lie on a grid over the rows of a task, and a step of the kernel is a strip x a block: scores, softmax, what is
// weighed. All that it needs stays in L1. A step has several runs where rows share nothing: softmax is done once for them.

namespace ISA {

constexpr int kStrip = kTile;                     // rows of a vector
constexpr int kChunks = kBlock / kTileDepth;      // parts of a block's keys that a left tile of values has
constexpr __mmask16 kAllLanes = 0xffff;
constexpr int kSums = 4;                          // tiles of sums at once
constexpr float kSlack = 8;                       // by so many powers of 2 weights may exceed 1

inline Vec larger(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }  // b if one is NaN

// 2^x within 1.1e-4 of it, 1/20 of what rounding to bf16 does (a fit that has 1 at 0 and 2 at 1); 0 below -126, where
// floats lose digits and processors time.
inline Vec exp2_of(Vec x) {
  const Vec r = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
  Vec p = all(0.07826797017231396f);
  p = p * r + 0.22630768227869597f;
  p = p * r + 0.6954243475489901f;
  p = p * r + 1.0f;
  const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, (__m512)all(-126), _CMP_NLE_UQ);  // NaN stays
  return (Vec)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)x);  // p * 2^floor(x)
}

// Adds to kLefts tiles of sums the products of as many left tiles, of which `left` gives the rows, with a right tile.
template <int kLefts, typename Left>
inline void add_to_sums(Left left, int64_t stride, const void* right) {
  _tile_loadd(4, right, kTileRowBytes);
  _tile_loadd(5, left(0), stride);
  _tile_dpbf16ps(0, 5, 4);
  if constexpr (kLefts > 1) {
    _tile_loadd(6, left(1), stride);
    _tile_dpbf16ps(1, 6, 4);
  }
  if constexpr (kLefts > 2) {
    _tile_loadd(7, left(2), stride);
    _tile_dpbf16ps(2, 7, 4);
  }
  if constexpr (kLefts > 3) {
    _tile_loadd(5, left(3), stride);
    _tile_dpbf16ps(3, 5, 4);
  }
}

// Calls `what` with a number of tiles from 1 to kSums as a constant.
template <typename What>
inline void with_tiles(int64_t count, What what) {
  switch (count) {
    case 1: return what(std::integral_constant<int, 1>());
    case 2: return what(std::integral_constant<int, 2>());
    case 3: return what(std::integral_constant<int, 3>());
    default: return what(std::integral_constant<int, kSums>());
  }
}

struct TileAttention : Task {
  using Setup = Tiles;

  // The keys [lo, hi) of a block that some queries see, of which `token` is the first.
  struct Run {
    int64_t token = -1, block = 0, lo = 0, hi = 0;
    int first_group() const { return (lo - block) / kTile; }
    int last_group() const { return (hi - 1 - block) / kTile; }
  };
  // What a run has of a strip.
  struct Part {
    Run run;
    __mmask16 lanes;
  };
  struct Step {
    Run run;          // all of its runs
    __mmask16 lanes;  // of all
    int64_t strip;
    float* scores;    // [kBlock][kStrip]
    int count;        // of parts; 0 when it is done
    Part parts[kStrip];
  };
  struct Values {
    Run run;
    LeftTiles chunks[kChunks];
  };

  // Rows are (query, head) with the heads of a query side by side.
  struct Scratch {
    float *query, *out;             // [strips][key_dim / 2][kStrip] pairs; [strips][value_stride][kStrip]
    float *max, *sum, *from, *to;   // [strips][kStrip]
    float *scores, *part_scores, *weights, *weighed, *weighed_parts, *keys, *values;
    Room room;

    void resize(int64_t num_rows, const Pages& pages) {
      const int64_t rows = tiles_in(num_rows, kStrip) * kStrip, width = pages.value_stride;
      room.divide({rows * pages.key_dim / 2, rows * width, rows, rows, rows, rows, 2 * kBlock * kStrip, kBlock * kStrip,
                   kBlock * kStrip / 2, width * kStrip, width * kStrip, kBlock * pages.key_dim / 2, kBlock * width},
                  {&query, &out, &max, &sum, &from, &to, &scores, &part_scores, &weights, &weighed, &weighed_parts, &keys,
                   &values});
      std::fill_n(out, rows * width, 0.0f);
      std::fill_n(max, rows, -INFINITY);
      std::fill_n(sum, rows, 0.0f);
    }
  };
  Scratch& scratch;
  Step steps[2] = {};     // the last one has scores and no more
  Values values[2] = {};  // of the last two runs that were weighed
  bool last_step = false, last_values = false;

  void begin() {
    const int64_t rows = (last - first) * group;
    scratch.resize(rows, pages);
    for (int64_t row = 0; row < rows; row += kStrip) {
      for (int64_t r = row; r < row + kStrip; r++) {
        const int64_t token = first + std::min(r / group, last - first - 1);
        reinterpret_cast<int32_t*>(scratch.from)[r] = from(token);
        reinterpret_cast<int32_t*>(scratch.to)[r] = to(token);
      }
      for (int d = 0; d < pages.key_dim; d += kTileDepth) load_queries(row, std::min<int64_t>(kStrip, rows - row), d);
    }
  }

  // 32 dims of the queries of a strip, as a right tile.
  void load_queries(int64_t row, int64_t rows, int dim) {
    Vec pairs[kTile] = {};
    for (int64_t r = 0; r < rows; r++)
      std::memcpy(&pairs[r], of<const uint16_t>(query, first + (row + r) / group, head * group + (row + r) % group) + dim,
                  kTileRowBytes);
    pack_right_tile(pairs, query_tile(row / kStrip, dim));
  }

  float* query_tile(int64_t strip, int dim) const { return scratch.query + (strip * pages.key_dim + dim) / 2 * kStrip; }
  float* out_of(int64_t strip) const { return scratch.out + strip * pages.value_stride * kStrip; }

  void attend_run(int64_t block, int64_t begin, int64_t end, int64_t lo, int64_t hi) {
    const Run run = {begin, block, lo, hi};
    LeftTiles keys[kGroups];
    find_keys(run, keys);
    const int64_t row = (begin - first) * group, end_row = (end - first) * group;
    for (int64_t strip = row / kStrip; strip * kStrip < end_row; strip++) {
      const Part part = {run, lanes_of(row - strip * kStrip, end_row - strip * kStrip)};
      const Step& step = steps[last_step];
      if (step.count && step.run.block == block && step.strip == strip)
        join_step(part, keys);
      else
        begin_step(part, strip, keys);
    }
  }

  // The products of a step are where those of the next one begin: away from the softmax that writes what they read.
  void begin_step(const Part& part, int64_t strip, const LeftTiles* keys) {
    Step& before = steps[last_step];
    if (before.count) softmax(before);
    last_step = !last_step;
    float* scores = scratch.scores + last_step * kBlock * kStrip;
    steps[last_step] = {part.run, part.lanes, strip, scores, 1, {part}};
    score_keys(keys, part.run, strip, scores);
    if (before.count) weigh(before);
  }

  void join_step(const Part& part, const LeftTiles* keys) {
    Step& step = steps[last_step];
    score_keys(keys, part.run, step.strip, scratch.part_scores);
    for (int i = part.run.first_group() * kTile; i < (part.run.last_group() + 1) * kTile; i++)
      store_lanes(step.scores + i * kStrip, part.lanes, load(scratch.part_scores + i * kStrip));
    step.run.lo = std::min(step.run.lo, part.run.lo);
    step.run.hi = std::max(step.run.hi, part.run.hi);
    step.lanes |= part.lanes;
    step.parts[step.count++] = part;
  }

  // Lanes of a strip whose rows are in [begin, end), counted from its first.
  static __mmask16 lanes_of(int64_t begin, int64_t end) {
    const uint32_t below_end = end >= kStrip ? kAllLanes : (1u << end) - 1;
    return begin > 0 ? below_end >> begin << begin : below_end;
  }

  void find_keys(const Run& run, LeftTiles* keys) const {
    for (int64_t begin = run.lo / kTile * kTile; begin < run.hi; begin += kTile)
      keys[begin % kBlock / kTile] = keys_of(run.token, begin, std::max(run.lo, begin), std::min(run.hi, begin + kTile));
  }

  const LeftTiles* find_values(const Run& run) {
    const Run& there = values[last_values].run;
    if (there.token == run.token && there.block == run.block) return values[last_values].chunks;
    last_values = !last_values;
    values[last_values].run = run;
    for (int64_t begin = run.lo / kTileDepth * kTileDepth; begin < run.hi; begin += kTileDepth)
      values[last_values].chunks[begin % kBlock / kTileDepth] =
          values_of(run.token, begin, std::max(run.lo, begin), std::min(run.hi, begin + kTileDepth));
    return values[last_values].chunks;
  }

  // The 16 keys from `begin` on, of which [lo, hi) are there; the others are anything.
  LeftTiles keys_of(int64_t token, int64_t begin, int64_t lo, int64_t hi) const {
    const int64_t size = pages.page_size, bytes = pages.key_dim * sizeof(uint16_t);
    if (size % kTile == 0) return {key_page(token, lo) + begin % size * bytes, bytes};
    char* copy = reinterpret_cast<char*>(scratch.keys) + begin % kBlock * bytes;
    for (int64_t p = lo; p < hi; p++) std::memcpy(copy + (p - begin) * bytes, key_page(token, p) + p % size * bytes, bytes);
    return {copy, bytes};
  }

  // The chunk of values from `begin` on: where they lie if all are there, else copied, with zeros outside [lo, hi).
  LeftTiles values_of(int64_t token, int64_t begin, int64_t lo, int64_t hi) const {
    const int64_t size = pages.page_size, width = pages.value_stride;
    if (size % kTileDepth == 0 && hi - lo == kTileDepth)
      return {value_page(token, begin) + begin % size * sizeof(uint16_t), size * static_cast<int64_t>(sizeof(uint16_t))};
    auto* copy = reinterpret_cast<uint16_t*>(scratch.values) + (last_values * kBlock + begin % kBlock) * width;
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

  // Scores of a strip with the groups of keys that a run sees.
  void score_keys(const LeftTiles* keys, const Run& run, int64_t strip, float* scores) {
    const int first_group = run.first_group();
    finish_writing();
    with_tiles(run.last_group() - first_group + 1, [&](auto groups) {
      zero_sums<groups>();
      for (int d = 0; d < pages.key_dim; d += kTileDepth)
        add_to_sums<groups>([&](int g) { return keys[first_group + g].at(0, d); }, keys[first_group].stride,
                            query_tile(strip, d));
      store_sums<groups>(scores + first_group * kTileFloats);
    });
  }

  // Turns scores into weights, a right tile for each chunk of keys; 0 for keys that a row does not see.
  void softmax(const Step& step) {
    const int begin = step.run.first_group() * kTile, end = (step.run.last_group() + 1) * kTile;
    if (scoring.softcap > 0) cap(step.scores + begin * kStrip, (end - begin) * kStrip);
    const float scale = scoring.softcap > 0 ? kLog2E : scoring.scale * kLog2E;
    hide_unseen(step);
    raise_max(step, largest(step.scores + begin * kStrip, end - begin) * scale);
    const Vec most = load(scratch.max + step.strip * kStrip);

    Vec even_sum = {}, odd_sum = {};
    for (int i = begin; i < end; i += 2) {
      const Vec even = exp2_of(load(step.scores + i * kStrip) * scale - most);
      const Vec odd = exp2_of(load(step.scores + (i + 1) * kStrip) * scale - most);
      even_sum = even_sum + even;
      odd_sum = odd_sum + odd;
      store_pairs(even, odd, scratch.weights + i / 2 * kStrip);
    }
    if (step.run.first_group() % 2) std::fill_n(scratch.weights + (begin - kTile) / 2 * kStrip, kTileFloats / 2, 0.0f);
    if (step.run.last_group() % 2 == 0) std::fill_n(scratch.weights + end / 2 * kStrip, kTileFloats / 2, 0.0f);
    float* sum = scratch.sum + step.strip * kStrip;
    store_lanes(sum, step.lanes, load(sum) + (even_sum + odd_sum));
  }

  void cap(float* scores, int64_t count) const {
    for (int64_t i = 0; i < count; i++)
      scores[i] = scoring.softcap * std::tanh(scores[i] * scoring.scale / scoring.softcap);
  }

  // Scores of keys that are not for a row become -infinity, in the groups in which some row does not see all.
  void hide_unseen(const Step& step) {
    VecInt from, to;
    std::memcpy(&from, scratch.from + step.strip * kStrip, sizeof(from));
    std::memcpy(&to, scratch.to + step.strip * kStrip, sizeof(to));
    for (int g = step.run.first_group(); g <= step.run.last_group(); g++) {
      const VecInt position = static_cast<int32_t>(step.run.block + g * kTile) - VecInt{};
      const __mmask16 see_all = _mm512_cmple_epi32_mask((__m512i)from, (__m512i)position) &
                                _mm512_cmple_epi32_mask((__m512i)(position + kTile), (__m512i)to);
      if ((see_all & step.lanes) == step.lanes) continue;
      float* scores = step.scores + g * kTileFloats;
      for (int i = 0; i < kTile; i++, scores += kStrip)
        store(scores, (from <= position + i) & (position + i < to) ? load(scores) : all(-INFINITY));
    }
  }

  // The largest of each lane of `count` vectors, a multiple of 4.
  static Vec largest(const float* vectors, int count) {
    Vec most[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
    for (int i = 0; i < count; i += 4)
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) most[j] = larger(load(vectors + (i + j) * kStrip), most[j]);
    return larger(larger(most[0], most[1]), larger(most[2], most[3]));
  }

  // What weights are relative to follows a row's largest score only where that is far ahead of it. What the row has is
  // rescaled then: seldom after its first block, and elsewhere the factor is 1, so that bits do not depend on other rows.
  void raise_max(const Step& step, Vec most) {
    float *max = scratch.max + step.strip * kStrip, *sum = scratch.sum + step.strip * kStrip;
    const Vec before = load(max);
    const __mmask16 is_ahead = _mm512_mask_cmp_ps_mask(step.lanes, (__m512)most, (__m512)(before + kSlack), _CMP_GT_OQ);
    if (!is_ahead) return;
    store_lanes(max, is_ahead, most);
    const __mmask16 have = _mm512_mask_cmp_ps_mask(is_ahead, (__m512)before, (__m512)all(-INFINITY), _CMP_GT_OQ);
    if (!have) return;  // at their first block, usually
    const Vec factor = (Vec)_mm512_mask_blend_ps(is_ahead, (__m512)all(1), (__m512)exp2_of(before - most));
    store(sum, load(sum) * factor);
    float* out = out_of(step.strip);
    for (int d = 0; d < pages.value_stride; d++) store(out + d * kStrip, load(out + d * kStrip) * factor);
  }

  static void store_lanes(float* to, __mmask16 lanes, Vec value) { _mm512_mask_storeu_ps(to, lanes, (__m512)value); }

  // Adds the values by the weights to what the rows have. Values are copied a part ahead: a tile that is loaded soon after
  // it was written waits.
  void weigh(Step& step) {
    const LeftTiles* next = find_values(step.parts[0].run);
    for (int i = 0; i < step.count; i++) {
      const LeftTiles* values = next;
      if (i + 1 < step.count) next = find_values(step.parts[i + 1].run);
      weigh_values(step.parts[i], step.strip, values);
    }
    if (step.parts[0].lanes != kAllLanes) copy_lanes(step.lanes, scratch.weighed_parts, out_of(step.strip));
    step.count = 0;
  }

  // A part must leave the other rows of a strip alone: its values may be no numbers. So what it gives goes elsewhere.
  void weigh_values(const Part& part, int64_t strip, const LeftTiles* values) {
    const Run& run = part.run;
    const bool is_whole = part.lanes == kAllLanes;
    const int64_t width = pages.value_stride;
    float *out = out_of(strip), *to = is_whole ? out : scratch.weighed;
    finish_writing();
    for (int64_t d = 0; d < width; d += kSums * kTile)
      with_tiles((width - d) / kTile, [&](auto tiles) {
        load_sums<tiles>(out + d * kStrip);
        for (int c = run.first_group() / 2; c <= run.last_group() / 2; c++)
          add_to_sums<tiles>([&](int i) { return values[c].at(d + i * kTile, 0); }, values[c].stride,
                             scratch.weights + c * kTileFloats);
        store_sums<tiles>(to + d * kStrip);
      });
    if (!is_whole) copy_lanes(part.lanes, to, scratch.weighed_parts);
  }

  void copy_lanes(__mmask16 lanes, const float* from, float* to) const {
    const int64_t width = pages.value_stride;
#pragma GCC unroll 8
    for (int64_t d = 0; d < width; d++) store_lanes(to + d * kStrip, lanes, load(from + d * kStrip));
  }

  void finish() {
    softmax(steps[last_step]);
    weigh(steps[last_step]);
    const int64_t rows = (last - first) * group;
    for (int64_t row = 0; row < rows; row += kStrip) {
      const Vec scale = 1 / total(row);
      for (int d = 0; d < pages.value_dim; d += kTile) store_results(row, std::min<int64_t>(kStrip, rows - row), d, scale);
    }
  }

  // The sums of a strip, with the sinks. What was weighed is rescaled if a sink is larger than all scores that count.
  Vec total(int64_t row) {
    const Vec sum = load(scratch.sum + row), most = load(scratch.max + row);
    if (!scoring.sinks) return sum;
    Vec sink;
    for (int lane = 0; lane < kStrip; lane++) sink[lane] = scoring.sinks[head * group + (row + lane) % group] * kLog2E;
    const Vec largest = larger(sink, most), factor = exp2_of(most - largest);
    float* out = out_of(row / kStrip);
    for (int d = 0; d < pages.value_stride; d++) store(out + d * kStrip, load(out + d * kStrip) * factor);
    return sum * factor + exp2_of(sink - largest);
  }

  // 16 dims of the results of a strip.
  void store_results(int64_t row, int64_t rows, int dim, Vec scale) {
    Vec square[kTile];
    const float* from = out_of(row / kStrip) + dim * kStrip;
#pragma GCC unroll 16
    for (int d = 0; d < kTile; d++) square[d] = load(from + d * kStrip) * scale;
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
