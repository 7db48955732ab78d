// What the kernels of attention have in common, once for each instruction set.
//
// A task is a tile of queries x one KV head. It goes through the key blocks from the first to the last position and keeps
// the running softmax (max, sum, weighted values) of every (query, head): its rows. Within a block, neighbouring queries
// whose pages are the same form a run, for which each key is read once: that is how shared prefixes are. How a run is
// computed is the kernel's.

namespace ISA {

constexpr int kBlock = 64;                        // keys of a block, on the grid of absolute positions
constexpr int kGroups = kBlock / kLanes;
constexpr int kTileRows = 96;                     // most rows of a task, so that its scores and queries stay in cache

// A kernel derives from this. It has `begin()`, `attend_run(block, begin, end, lo, hi)` for the queries [begin, end) and
// the keys [lo, hi) of a block, and `finish()`.
struct Task {
  const Pages& pages;
  const Batch& batch;
  const Scoring& scoring;
  Heads query, out;
  int group;      // query heads of a KV head
  int head;       // the KV head
  int64_t first;  // its queries are [first, last)
  int64_t last;

  int64_t from(int64_t token) const {
    return batch.window ? std::max(0, batch.position[token] - batch.window + 1) : 0;
  }
  int64_t to(int64_t token) const { return batch.position[token] + 1; }
  // The part of a page that is this head's, counted in such parts.
  int64_t page_of(int64_t token, int64_t position) const {
    const int64_t entry = batch.token_row[token] * batch.table_width + position / pages.page_size;
    return batch.page_table[entry] * static_cast<int64_t>(pages.kv_heads) + head;
  }

  template <typename Kernel>
  void run(Kernel& kernel) const {
    kernel.begin();
    int64_t lo = from(first), hi = to(first);
    for (int64_t t = first; t < last; t++) lo = std::min(lo, from(t)), hi = std::max(hi, to(t));
    for (int64_t block = lo / kBlock * kBlock; block < hi; block += kBlock) attend_block(kernel, block);
    kernel.finish();
  }

  // Cuts the queries into runs that see keys of this block in the same pages.
  template <typename Kernel>
  void attend_block(Kernel& kernel, int64_t block) const {
    for (int64_t t = first; t < last;) {
      int64_t lo = std::max(from(t), block), hi = std::min(to(t), block + kBlock);
      int64_t end = t + 1;
      if (lo < hi) {
        for (; end < last && joins(t, end, block, lo, hi); end++) {
          lo = std::min(lo, std::max(from(end), block));
          hi = std::max(hi, std::min(to(end), block + kBlock));
        }
        if (end < last && pages.page_size <= kBlock) fetch(end, block);
        kernel.attend_run(block, t, end, lo, hi);
      }
      t = end;
    }
  }

  // Asks for the pages of what a query sees of a block: they lie anywhere in memory. (Inline, or GCC takes it for a function
  // without effects and leaves it out.)
  __attribute__((always_inline)) void fetch(int64_t token, int64_t block) const {
    const int64_t size = pages.page_size, hi = std::min(to(token), block + kBlock);
    for (int64_t p = std::max(from(token), block); p < hi; p = (p / size + 1) * size) {
      const char *key = key_page(token, p), *value = value_page(token, p);
      for (int64_t i = 0; i < key_page_bytes(); i += 64) __builtin_prefetch(key + i);
      for (int64_t i = 0; i < value_page_bytes(); i += 64) __builtin_prefetch(value + i);
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

  // The keys of the page that a position is in, and its values.
  const char* key_page(int64_t token, int64_t position) const {
    return static_cast<const char*>(pages.key) + page_of(token, position) * key_page_bytes();
  }
  const char* value_page(int64_t token, int64_t position) const {
    return static_cast<const char*>(pages.value) + page_of(token, position) * value_page_bytes();
  }
  int64_t key_page_bytes() const { return pages.page_size * pages.key_dim * element_bytes(); }
  int64_t value_page_bytes() const { return pages.page_size * pages.value_stride * element_bytes(); }
  int64_t element_bytes() const { return pages.dtype == kFloat32 ? 4 : pages.dtype == kBfloat16 ? 2 : 1; }

  // Where a query has its numbers, or its results.
  template <typename Tensor>
  static Tensor* of(Heads heads, int64_t token, int64_t query_head) {
    return static_cast<Tensor*>(heads.data) + query_head * heads.head_stride + token * heads.token_stride;
  }
};

template <typename Kernel>
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
    static thread_local typename Kernel::Scratch scratch;
    [[maybe_unused]] const typename Kernel::Setup setup;
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
      Kernel kernel{{pages, batch, scoring, query, out, group, static_cast<int>(task % pages.kv_heads), first,
                     std::min(first + tile, batch.num_tokens)},
                    scratch};
      kernel.run(kernel);
    }
  }
}

}  // namespace ISA
