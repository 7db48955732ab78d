// The C interface: leads to the kernel of an instruction set, and moves keys and values into their pages.
#include "isa.h"

DECLARE_KERNEL(void attend_pages(const Pages&, const Batch&, int, Heads, Heads, const Scoring&))

namespace {

// One key or value to its place, whose elements are `stride` apart.
template <typename Element>
void put(const Element* vector, int64_t dim, Element* to, int64_t stride, float*, int64_t) {
  for (int64_t d = 0; d < dim; d++) to[d * stride] = vector[d];
}

// The same, quantized: bit for bit what kernels/quantization.py makes of it.
void put(const float* vector, int64_t dim, int8_t* to, int64_t stride, float* scales, int64_t slot) {
  float largest = 0;
  for (int64_t d = 0; d < dim; d++) {
    const float size = std::fabs(vector[d]);
    largest = size > largest || size != size ? size : largest;  // NaN stays
  }
  const float wanted = largest / 127, scale = wanted < FLT_MIN ? FLT_MIN : wanted;
  scales[slot] = scale;
  for (int64_t d = 0; d < dim; d++) {
    const float shifted = vector[d] / scale + 12582912.0f;  // 1.5 * 2^23: rounds to even, integer in the low bits
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    to[d * stride] = static_cast<int8_t>(bits);
  }
}

template <typename Element>
void put_token(const Pages& pages, const Batch& batch, int64_t token, int64_t head, Heads key, Heads value) {
  using Tensor = typename TensorOf<Element>::type;
  const int64_t size = pages.page_size, offset = batch.slots[token] % size;
  const int64_t page = batch.slots[token] / size * pages.kv_heads + head, slot = page * size + offset;
  const auto* from_key = static_cast<const Tensor*>(key.data) + head * key.head_stride + token * key.token_stride;
  const auto* from_value = static_cast<const Tensor*>(value.data) + head * value.head_stride + token * value.token_stride;
  auto *keys = static_cast<Element*>(pages.key), *values = static_cast<Element*>(pages.value);
  if (pages.layout == kKeysSideBySide) {
    put(from_key, pages.key_dim, keys + page * pages.key_dim * size + offset, size, pages.key_scale, slot);
    put(from_value, pages.value_dim, values + slot * pages.value_stride, 1, pages.value_scale, slot);
  } else {
    put(from_key, pages.key_dim, keys + slot * pages.key_dim, 1, pages.key_scale, slot);
    put(from_value, pages.value_dim, values + page * pages.value_stride * size + offset, size, pages.value_scale, slot);
  }
}

// Copies the first `count` elements of each of `rows` rows of a page, which are `length` long, to another page.
template <typename Element>
void copy_rows(Element* pool, int64_t src, int64_t dst, int64_t rows, int64_t length, int64_t count) {
  for (int64_t row = 0; row < rows; row++)
    std::memcpy(pool + (dst * rows + row) * length, pool + (src * rows + row) * length, count * sizeof(Element));
}

template <typename Element>
void store(const Pages& pages, const Batch& batch, Heads key, Heads value) {
#pragma omp parallel for schedule(static) if (16 * batch.num_tokens * pages.kv_heads * pages.key_dim >= kWorthThreads)
  for (int64_t task = 0; task < batch.num_tokens * pages.kv_heads; task++)
    put_token<Element>(pages, batch, task / pages.kv_heads, task % pages.kv_heads, key, value);
  const int64_t heads = pages.kv_heads, size = pages.page_size, dim = pages.key_dim, stride = pages.value_stride;
  for (int64_t i = 0; i < batch.num_copies; i++) {
    const int64_t src = batch.copy_src[i], dst = batch.copy_dst[i], slots = batch.copy_slots[i];
    auto *keys = static_cast<Element*>(pages.key), *values = static_cast<Element*>(pages.value);
    if (pages.layout == kKeysSideBySide) {
      copy_rows(keys, src, dst, heads * dim, size, slots);
      copy_rows(values, src, dst, heads, size * stride, slots * stride);
    } else {
      copy_rows(keys, src, dst, heads, size * dim, slots * dim);
      copy_rows(values, src, dst, heads * stride, size, slots);
    }
    if constexpr (std::is_same_v<Element, int8_t>) {
      copy_rows(pages.key_scale, src, dst, heads, size, slots);
      copy_rows(pages.value_scale, src, dst, heads, size, slots);
    }
  }
}

}  // namespace

extern "C" void batchkv_store(const Pages* pages, const Batch* batch, Heads key, Heads value) {
  if (pages->dtype == kFloat32)
    store<float>(*pages, *batch, key, value);
  else if (pages->dtype == kInt8)
    store<int8_t>(*pages, *batch, key, value);
  else
    store<uint16_t>(*pages, *batch, key, value);
}

extern "C" void batchkv_attend(InstructionSet instruction_set, const Pages* pages, const Batch* batch,
                               int32_t query_heads, Heads query, Heads out, Scoring scoring) {
  CALL_KERNEL(instruction_set, attend_pages(*pages, *batch, query_heads, query, out, scoring));
}

extern "C" int32_t batchkv_pages_size() { return sizeof(Pages); }
extern "C" int32_t batchkv_batch_size() { return sizeof(Batch); }
