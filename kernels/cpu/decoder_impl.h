// The layers of a decoder, of the other kernels.

namespace ISA {

// Adds `size` numbers to those of `sums`.
template <typename Element>
void add_numbers(const Element* numbers, Element* sums, int64_t size) {
  int64_t i = 0;
  for (; i + VECTOR_FLOATS <= size; i += VECTOR_FLOATS)
    store_floats(load_floats(sums + i) + load_floats(numbers + i), sums + i);
  if (i == size) return;
  Element rest[2][VECTOR_FLOATS] = {};  // the last ones go through the same code
  std::copy(sums + i, sums + size, rest[0]);
  std::copy(numbers + i, numbers + size, rest[1]);
  store_floats(load_floats(rest[0]) + load_floats(rest[1]), rest[0]);
  std::copy_n(rest[0], size - i, sums + i);
}

// One layer's way through a step. What an attention or an MLP gives is in `normed` until it is added to `hidden`, which
// happens where its rows are normed and read next.
template <typename Element>
struct LayerPass {
  const DecoderLayer& layer;
  const DecoderStep& step;
  bool is_first;

  int64_t width() const { return layer.query.in_features; }

  void run() const {
    const auto make_first = [&](int64_t first, int64_t last) { make_rows(layer.input_norm, !is_first, first, last); };
    linear_layers(linear(layer.query, step.normed, step.query), linear(layer.key, step.normed, step.key),
                  linear(layer.value, step.normed, step.value), make_first);
    attend();
    linear_layer(linear(layer.projection, step.attended, step.normed));
    Linear down = linear(layer.down, step.inner, step.normed);
    down.strips = step.inner_strips;
    gated_mlp(linear(layer.gated, step.normed, step.inner), down,
              [&](int64_t first, int64_t last) { make_rows(layer.post_norm, true, first, last); });
  }

  void make_rows(const Norm& norm, bool has_more, int64_t first, int64_t last) const {
    for (int64_t row = first; row < last; row++) {
      auto *hidden = row_of(step.hidden, row, width()), *normed = row_of(step.normed, row, width());
      if (has_more) add_numbers(normed, hidden, width());
      norm_row(hidden, static_cast<const Element*>(norm.weight), normed, width(), norm.epsilon);
    }
  }

  void attend() const {
    norm_heads(layer.query_norm, step.query, step.query_heads);
    norm_heads(layer.key_norm, step.key, step.key_heads);
    const Heads query = heads(step.query, step.query_heads), key = heads(step.key, step.key_heads);
    rotate({query, key, query, key, step.cos, step.sin, step.num_tokens, step.query_heads, step.key_heads, step.head_dim,
            step.dtype});
    batchkv_store(layer.pages, layer.batch, key, heads(step.value, step.key_heads));
    attend_pages(*layer.pages, *layer.batch, step.query_heads, query, heads(step.attended, step.query_heads),
                 {layer.scale, 0, nullptr});
    const int64_t size = int64_t{step.query_heads} * step.head_dim;
    std::fill(row_of(step.attended, layer.batch->num_tokens, size), row_of(step.attended, step.num_tokens, size), Element{});
  }

  void norm_heads(const Norm& norm, void* rows, int64_t count) const {
    if (norm.weight)
      rms_norm(rows, norm.weight, rows, step.num_tokens * count, step.head_dim, norm.epsilon, step.dtype);
  }

  Linear linear(Linear layer, const void* rows, void* out) const {
    layer.rows = rows, layer.out = out, layer.strips = step.strips, layer.num_rows = step.num_tokens;
    return layer;
  }

  static Element* row_of(void* rows, int64_t row, int64_t size) { return static_cast<Element*>(rows) + row * size; }

  Heads heads(void* data, int64_t count) const { return {data, step.head_dim, count * step.head_dim}; }
};

template <typename Element>
void pass_all(const DecoderLayer* layers, int64_t num_layers, const DecoderStep& step) {
  for (int64_t i = 0; i < num_layers; i++) LayerPass<Element>{layers[i], step, i == 0}.run();
  add_numbers(static_cast<const Element*>(step.normed), static_cast<Element*>(step.hidden),
              step.num_tokens * layers[0].query.in_features);
}

void pass_layers(const DecoderLayer* layers, int64_t num_layers, const DecoderStep& step) {
  (step.dtype == kFloat32 ? pass_all<float> : pass_all<uint16_t>)(layers, num_layers, step);
}

}  // namespace ISA
