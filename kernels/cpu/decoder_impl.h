// The layers of a decoder, of the other kernels.

namespace ISA {

// Adds numbers to the ones of `sums`.
template <typename Element>
void add_numbers(const void* numbers, void* sums, int64_t size) {
  const auto* from = static_cast<const Element*>(numbers);
  auto* to = static_cast<Element*>(sums);
  const int64_t whole = size / VECTOR_FLOATS * VECTOR_FLOATS;
#pragma omp parallel for schedule(static) if (size >= kWorthThreads)
  for (int64_t i = 0; i < whole; i += VECTOR_FLOATS) store_floats(load_floats(to + i) + load_floats(from + i), to + i);
  Element rest[2][VECTOR_FLOATS] = {};  // the last ones go through the same code
  std::copy(to + whole, to + size, rest[0]);
  std::copy(from + whole, from + size, rest[1]);
  store_floats(load_floats(rest[0]) + load_floats(rest[1]), rest[0]);
  std::copy_n(rest[0], size - whole, to + whole);
}

// One layer's way through a step.
struct LayerPass {
  const DecoderLayer& layer;
  const DecoderStep& step;

  int64_t width() const { return layer.query.in_features; }

  void run() const {
    norm(layer.input_norm, step.hidden, step.normed, step.num_tokens, width());
    linear_layers(linear(layer.query, step.normed, step.query), linear(layer.key, step.normed, step.key),
                  linear(layer.value, step.normed, step.value));
    attend();
    linear_layer(linear(layer.projection, step.attended, step.normed));
    add(step.normed);
    norm(layer.post_norm, step.hidden, step.normed, step.num_tokens, width());
    Linear down = linear(layer.down, step.inner, step.normed);
    down.strips = step.inner_strips;
    gated_mlp(linear(layer.gated, step.normed, step.inner), down);
    add(step.normed);
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
    const int64_t row = int64_t{step.query_heads} * step.head_dim * element_bytes();
    const int64_t attended = layer.batch->num_tokens;
    std::memset(static_cast<char*>(step.attended) + attended * row, 0, (step.num_tokens - attended) * row);
  }

  void norm(const Norm& norm, const void* rows, void* out, int64_t num_rows, int64_t size) const {
    rms_norm(rows, norm.weight, out, num_rows, size, norm.epsilon, step.dtype);
  }

  void norm_heads(const Norm& of_heads, void* rows, int64_t count) const {
    if (of_heads.weight) norm(of_heads, rows, rows, step.num_tokens * count, step.head_dim);
  }

  Linear linear(Linear layer, const void* rows, void* out) const {
    layer.rows = rows, layer.out = out, layer.strips = step.strips, layer.num_rows = step.num_tokens;
    return layer;
  }

  void add(const void* numbers) const {
    (step.dtype == kFloat32 ? add_numbers<float> : add_numbers<uint16_t>)(numbers, step.hidden, step.num_tokens * width());
  }

  Heads heads(void* data, int64_t count) const { return {data, step.head_dim, count * step.head_dim}; }

  int64_t element_bytes() const { return step.dtype == kFloat32 ? sizeof(float) : sizeof(uint16_t); }
};

void pass_layer(const DecoderLayer& layer, const DecoderStep& step) { LayerPass{layer, step}.run(); }

}  // namespace ISA
