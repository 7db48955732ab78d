// The kernel, once for vectors of any width (vectors.h).
//
// A task is a tile of queries x one KV head. It goes through the key blocks from the first to the last position and keeps
// the running softmax (max, sum, weighted values) of every (query, head): its rows. Within a block, neighbouring queries
// whose pages are the same form a run, for which each key is read once: that is how shared prefixes are.

namespace ISA {

constexpr int kBlock = 64;                        // keys of a block, on the grid of absolute positions
constexpr int kGroups = kBlock / kLanes;
constexpr int kTileRows = 96;                     // most rows of a task, so that its scores and queries stay in cache

// Memory of a task, kept from one to the next. Rows are (query, head) with the heads of a query side by side.
struct Scratch {
  float *query, *scores, *out, *max, *sum, *keys, *values;

  void resize(int64_t rows, const Pages& pages) {
    const int64_t sizes[] = {rows * pages.key_dim,    rows * kBlock, rows * pages.value_stride, rows, rows,
                             kBlock * pages.key_dim, kBlock * pages.value_stride};
    float** parts[] = {&query, &scores, &out, &max, &sum, &keys, &values};
    int64_t total = 0;
    for (int64_t size : sizes) total += size;
    if (total > capacity_) {
      std::free(memory_);
      memory_ = static_cast<float*>(std::malloc(total * sizeof(float)));
      if (!memory_) std::abort();  // a few hundred KiB
      capacity_ = total;
    }
    float* at = memory_;
    for (int i = 0; i < 7; at += sizes[i++]) *parts[i] = at;
    for (int64_t i = 0; i < rows * pages.value_stride; i++) out[i] = 0;
    for (int64_t i = 0; i < rows; i++) max[i] = -INFINITY, sum[i] = 0;
  }

  ~Scratch() { std::free(memory_); }

 private:
  float* memory_ = nullptr;
  int64_t capacity_ = 0;
};

template <typename Element>
struct Task {
  using Tensor = typename TensorOf<Element>::type;
  const Pages& pages;
  const Batch& batch;
  const Scoring& scoring;
  Heads query, out;
  int group;      // query heads of a KV head
  int head;       // the KV head
  int64_t first;  // its queries are [first, last)
  int64_t last;
  Scratch& scratch;

  int64_t from(int64_t token) const {
    return batch.window ? std::max(0, batch.position[token] - batch.window + 1) : 0;
  }
  int64_t to(int64_t token) const { return batch.position[token] + 1; }
  // The part of a page that is this head's, counted in such parts.
  int64_t page_of(int64_t token, int64_t position) const {
    const int64_t entry = batch.token_row[token] * batch.table_width + position / pages.page_size;
    return batch.page_table[entry] * static_cast<int64_t>(pages.kv_heads) + head;
  }

  void run() {
    scratch.resize((last - first) * group, pages);
    load_queries();
    int64_t lo = from(first), hi = to(first);
    for (int64_t t = first; t < last; t++) lo = std::min(lo, from(t)), hi = std::max(hi, to(t));
    for (int64_t block = lo / kBlock * kBlock; block < hi; block += kBlock) attend_block(block);
    store_results();
  }

  void load_queries() {
    for (int64_t t = first; t < last; t++)
      for (int g = 0; g < group; g++) {
        const Tensor* from = static_cast<const Tensor*>(query.data) + (head * group + g) * query.head_stride +
                              t * query.token_stride;
        float* to = &scratch.query[((t - first) * group + g) * pages.key_dim];
        for (int d = 0; d < pages.key_dim; d++) to[d] = to_float(from[d]);
      }
  }

  // Cuts the queries into runs that see keys of this block in the same pages.
  void attend_block(int64_t block) {
    for (int64_t t = first; t < last;) {
      int64_t lo = std::max(from(t), block), hi = std::min(to(t), block + kBlock);
      int64_t end = t + 1;
      if (lo < hi) {
        for (; end < last && joins(t, end, block, lo, hi); end++) {
          lo = std::min(lo, std::max(from(end), block));
          hi = std::max(hi, std::min(to(end), block + kBlock));
        }
        if (end < last && pages.page_size <= kBlock) fetch(end, block);
        attend_run(block, t, end, lo, hi);
      }
      t = end;
    }
  }

  // Asks for the pages of what a query sees of a block: they lie anywhere in memory. (Inline, or GCC takes it for a function
  // without effects and leaves it out.)
  __attribute__((always_inline)) void fetch(int64_t token, int64_t block) const {
    const int64_t size = pages.page_size, hi = std::min(to(token), block + kBlock);
    for (int64_t p = std::max(from(token), block); p < hi; p = (p / size + 1) * size) {
      const char* key = reinterpret_cast<const char*>(keys_of(token, p));
      const char* value = reinterpret_cast<const char*>(values_of(token, p));
      for (uint64_t i = 0; i < pages.key_dim * size * sizeof(Element); i += 64) __builtin_prefetch(key + i);
      for (uint64_t i = 0; i < pages.value_stride * size * sizeof(Element); i += 64) __builtin_prefetch(value + i);
    }
  }

  // Whether a query can share the keys [lo, hi) of the block with a run that begins with `leader`.
  bool joins(int64_t leader, int64_t token, int64_t block, int64_t lo, int64_t hi) const {
    int64_t my_lo = std::max(from(token), block), my_hi = std::min(to(token), block + kBlock);
    if (my_lo >= my_hi || my_lo > hi || my_hi < lo) return false;  // nothing to see, or a gap that nobody may have written
    if (batch.token_row[leader] == batch.token_row[token]) return true;
    int64_t size = pages.page_size, page = lo / size, last_page = (hi - 1) / size;
    if (my_lo / size != page || (my_hi - 1) / size != last_page) return false;
    for (; page <= last_page; page++)
      if (page_of(leader, page * size) != page_of(token, page * size)) return false;
    return true;
  }

  void attend_run(int64_t block, int64_t begin, int64_t end, int64_t lo, int64_t hi) {
    const int rows = (end - begin) * group;
    const int64_t row = (begin - first) * group;
    const int first_group = (lo - block) / kLanes, last_group = (hi - 1 - block) / kLanes;
    for (int g = first_group; g <= last_group; g++) {
      int64_t group_lo = std::max(lo, block + g * kLanes), group_hi = std::min(hi, block + (g + 1) * kLanes);
      score_keys(begin, block, g, group_lo, group_hi, row, rows);
    }
    if constexpr (std::is_same_v<Element, int8_t>) scale_columns(pages.key_scale, begin, block, lo, hi, row, rows);
    for (int64_t t = begin; t < end; t++)
      for (int g = 0; g < group; g++)
        softmax((t - first) * group + g, std::max(from(t), block) - block, std::min(to(t), block + kBlock) - block,
                first_group, last_group);
    if constexpr (std::is_same_v<Element, int8_t>) scale_columns(pages.value_scale, begin, block, lo, hi, row, rows);
    weigh_values(begin, block, lo, hi, row, rows);
  }

  // Whether a run reads keys and values where they lie; for more rows they are made floats once.
  bool in_place(int rows) const { return std::is_same_v<Element, float> || rows <= kMostRows; }

  // Scores of a run's rows with the keys of one group of lanes; those with keys outside [lo, hi) are anything.
  void score_keys(int64_t token, int64_t block, int group_number, int64_t lo, int64_t hi, int64_t row, int rows) {
    const auto multiply_by = [&](auto keys) {
      multiply<false>(Rows{&scratch.query[row * pages.key_dim], pages.key_dim}, keys, pages.key_dim,
                      &scratch.scores[row * kBlock + group_number * kLanes], kBlock, rows);
    };
    const int64_t size = pages.page_size, begin = block + group_number * kLanes;
    float* packed = &scratch.keys[group_number * kLanes * pages.key_dim];
    if (size % kLanes == 0) {  // all in one page
      const Element* from = keys_of(token, lo) + begin % size;
      if (in_place(rows)) return multiply_by(Strided<Element>{from, size});
      for (int d = 0; d < pages.key_dim; d++) widen(from + d * size, packed + d * kLanes);
    } else {
      for (int64_t p = lo, stop; p < hi; p = stop) {
        stop = std::min(hi, (p / size + 1) * size);
        const Element* from = keys_of(token, p) + p % size;
        for (int d = 0; d < pages.key_dim; d++)
          for (int64_t i = 0; i < stop - p; i++) packed[d * kLanes + p - begin + i] = to_float(from[d * size + i]);
      }
    }
    multiply_by(Strided<float>{packed, kLanes});
  }

  // Adds to the results of a run's rows the values in [lo, hi), by the weights that the scores have become.
  void weigh_values(int64_t token, int64_t block, int64_t lo, int64_t hi, int64_t row, int rows) {
    const auto multiply_by = [&](auto values, int d) {
      multiply<true>(Rows{&scratch.scores[row * kBlock + lo - block], kBlock}, values, hi - lo,
                     &scratch.out[row * pages.value_stride + d], pages.value_stride, rows);
    };
    const int64_t stride = pages.value_stride;
    const Element* listed[kBlock];
    list_values(token, lo, hi, listed);
    if (in_place(rows)) {
      for (int d = 0; d < stride; d += kLanes) multiply_by(Listed<Element>{listed, d}, d);
    } else {
      for (int64_t i = 0; i < hi - lo; i++)
        for (int64_t d = 0; d < stride; d += kLanes) widen(listed[i] + d, &scratch.values[i * stride + d]);
      for (int d = 0; d < stride; d += kLanes) multiply_by(Strided<float>{scratch.values + d, stride}, d);
    }
  }

  // Multiplies what rows have of each key in [lo, hi) by the scale of the key or of the value.
  void scale_columns(const float* scales, int64_t token, int64_t block, int64_t lo, int64_t hi, int64_t row, int rows) {
    float scale[kBlock];
    for (int64_t p = lo, size = pages.page_size; p < hi;) {
      const int64_t stop = std::min(hi, (p / size + 1) * size);
      const float* from = scales + page_of(token, p) * size + p % size;
      std::memcpy(scale + p - lo, from, (stop - p) * sizeof(float));
      p = stop;
    }
    for (int r = 0; r < rows; r++) {
      float* scores = &scratch.scores[(row + r) * kBlock + lo - block];
      for (int i = 0; i < hi - lo; i++) scores[i] *= scale[i];
    }
  }

  // The keys of the page that a position is in, and its values.
  const Element* keys_of(int64_t token, int64_t position) const {
    return static_cast<const Element*>(pages.key) + page_of(token, position) * pages.key_dim * pages.page_size;
  }
  const Element* values_of(int64_t token, int64_t position) const {
    return static_cast<const Element*>(pages.value) + page_of(token, position) * pages.page_size * pages.value_stride;
  }

  // Where the values at the positions [lo, hi) are.
  void list_values(int64_t token, int64_t lo, int64_t hi, const Element** listed) const {
    const int64_t size = pages.page_size;
    for (int64_t p = lo; p < hi;) {
      const int64_t stop = std::min(hi, (p / size + 1) * size);
      const Element* value = values_of(token, p) + p % size * pages.value_stride;
      for (; p < stop; p++, value += pages.value_stride) listed[p - lo] = value;
    }
  }

  // Turns a row's scores into weights: those of the keys [lo, hi) of the block, 0 elsewhere; rescales what the row has.
  void softmax(int64_t row, int lo, int hi, int first_group, int last_group) {
    float* scores = &scratch.scores[row * kBlock];
    const int begin = first_group * kLanes, end = (last_group + 1) * kLanes;
    float scale = scoring.scale, largest = scratch.max[row];
    if (scoring.softcap > 0) {
      for (int i = lo; i < hi; i++) scores[i] = scoring.softcap * std::tanh(scores[i] * scale / scoring.softcap);
      scale = 1;
    }
    for (int i = begin; i < lo; i++) scores[i] = -INFINITY;
    for (int i = hi; i < end; i++) scores[i] = -INFINITY;
    Vec most = all(largest);
    for (int i = begin; i < end; i += VECTOR_FLOATS) {
      Vec score = load(scores + i) * scale;
      store(scores + i, score);
      most = score > most ? score : most;
    }
    for (int i = 0; i < VECTOR_FLOATS; i++) largest = std::max(largest, most[i]);

    Vec total = {};
    for (int i = begin; i < end; i += VECTOR_FLOATS) {
      Vec weight = exp_nonpositive(load(scores + i) - largest);
      store(scores + i, weight);
      total = total + weight;
    }
    float sum = 0;
    for (int i = 0; i < VECTOR_FLOATS; i++) sum += total[i];
    rescale(row, largest);
    scratch.sum[row] += sum;
  }

  void rescale(int64_t row, float largest) {
    if (scratch.max[row] == largest) return;
    const Vec factor = exp_nonpositive(all(scratch.max[row] - largest));  // 0 where there was nothing
    float* out = &scratch.out[row * pages.value_stride];
    for (int d = 0; d < pages.value_stride; d += VECTOR_FLOATS) store(out + d, load(out + d) * factor);
    scratch.sum[row] *= factor[0];
    scratch.max[row] = largest;
  }

  void store_results() {
    for (int64_t t = first; t < last; t++)
      for (int g = 0; g < group; g++) {
        const int64_t row = (t - first) * group + g, query_head = head * group + g;
        if (scoring.sinks) {
          const float sink = scoring.sinks[query_head];
          rescale(row, std::max(scratch.max[row], sink));
          scratch.sum[row] += exp_nonpositive(all(sink - scratch.max[row]))[0];
        }
        Tensor* to = static_cast<Tensor*>(out.data) + query_head * out.head_stride + t * out.token_stride;
        for (int d = 0; d < pages.value_dim; d++)
          from_float(scratch.out[row * pages.value_stride + d] / scratch.sum[row], to + d);
      }
  }
};

template <typename Element>
void attend(const Pages& pages, const Batch& batch, int query_heads, Heads query, Heads out, const Scoring& scoring) {
  const int group = query_heads / pages.kv_heads;
  const int64_t most = std::max(1, kTileRows / group);
  int64_t keys = 0;
  for (int64_t t = 0; t < batch.num_tokens; t++)
    keys += batch.window ? std::min(batch.position[t] + 1, batch.window) : batch.position[t] + 1;
  const bool is_large = keys * query_heads * pages.key_dim >= kWorthThreads;
  std::atomic<int64_t> next{0};
#pragma omp parallel if (is_large)
  {
    static thread_local Scratch scratch;
#ifdef _OPENMP
    const int64_t threads = omp_get_num_threads();
#else
    const int64_t threads = 1;
#endif
    // Tiles may have any size: small enough for all threads to have some, large enough to share.
    const int64_t work = batch.num_tokens * pages.kv_heads;
    const int64_t least = work < 8 * threads ? 1 : std::min<int64_t>(8, most);
    const int64_t tile = std::clamp<int64_t>(work / (4 * threads), least, most);
    const int64_t tiles = (batch.num_tokens + tile - 1) / tile;
    for (int64_t task; (task = next++) < tiles * pages.kv_heads;) {
      const int64_t first = task / pages.kv_heads * tile;
      Task<Element>{pages, batch, scoring, query, out, group, static_cast<int>(task % pages.kv_heads), first,
                    std::min(first + tile, batch.num_tokens), scratch}
          .run();
    }
  }
}

void attend_pages(const Pages& pages, const Batch& batch, int query_heads, Heads query, Heads out, const Scoring& scoring) {
  if (pages.dtype == kFloat32)
    attend<float>(pages, batch, query_heads, query, out, scoring);
  else if (pages.dtype == kInt8)
    attend<int8_t>(pages, batch, query_heads, query, out, scoring);
  else
    attend<uint16_t>(pages, batch, query_heads, query, out, scoring);
}

}  // namespace ISA
