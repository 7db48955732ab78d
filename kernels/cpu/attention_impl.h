// The kernel in vectors of any width (vectors.h), for pages with keys side by side.

namespace ISA {

template <typename Element>
struct VectorAttention : Task {
  using Tensor = typename TensorOf<Element>::type;
  struct Setup {};
  // Rows are (query, head) with the heads of a query side by side.
  struct Scratch {
    float *query, *scores, *out, *max, *sum, *keys, *values;
    Room room;

    void resize(int64_t rows, const Pages& pages) {
      room.divide({rows * pages.key_dim, rows * kBlock, rows * pages.value_stride, rows, rows, kBlock * pages.key_dim,
                   kBlock * pages.value_stride},
                  {&query, &scores, &out, &max, &sum, &keys, &values});
      std::fill_n(out, rows * pages.value_stride, 0.0f);
      std::fill_n(max, rows, -INFINITY);
      std::fill_n(sum, rows, 0.0f);
    }
  };
  Scratch& scratch;

  void begin() {
    scratch.resize((last - first) * group, pages);
    load_queries();
  }
  void finish() { store_results(); }

  void load_queries() {
    for (int64_t t = first; t < last; t++)
      for (int g = 0; g < group; g++) {
        const Tensor* from = of<const Tensor>(query, t, head * group + g);
        float* to = &scratch.query[((t - first) * group + g) * pages.key_dim];
        for (int d = 0; d < pages.key_dim; d++) to[d] = to_float(from[d]);
      }
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

  const Element* keys_of(int64_t token, int64_t position) const {
    return reinterpret_cast<const Element*>(key_page(token, position));
  }
  const Element* values_of(int64_t token, int64_t position) const {
    return reinterpret_cast<const Element*>(value_page(token, position));
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
        Tensor* to = of<Tensor>(out, t, query_head);
        for (int d = 0; d < pages.value_dim; d++)
          from_float(scratch.out[row * pages.value_stride + d] / scratch.sum[row], to + d);
      }
  }
};

void attend_pages(const Pages& pages, const Batch& batch, int query_heads, Heads query, Heads out, const Scoring& scoring) {
  if (pages.dtype == kFloat32)
    attend<VectorAttention<float>>(pages, batch, query_heads, query, out, scoring);
  else if (pages.dtype == kInt8)
    attend<VectorAttention<int8_t>>(pages, batch, query_heads, query, out, scoring);
#ifdef BATCHKV_IN_TILES
  else if (pages.layout == kValuesSideBySide)
    attend<TileAttention>(pages, batch, query_heads, query, out, scoring);
#endif
  else
    attend<VectorAttention<uint16_t>>(pages, batch, query_heads, query, out, scoring);
}

}  // namespace ISA
