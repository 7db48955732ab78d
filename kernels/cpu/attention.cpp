// The C interface: leads to the kernel of an instruction set, and moves keys and values into their pages.
#include "isa.h"

#define DECLARE(ISA) \
  namespace ISA {    \
  void attend_pages(const Pages&, const Batch&, int, Heads, Heads, const Scoring&); \
  }
DECLARE(portable)
DECLARE(avx2)
DECLARE(avx512)

namespace {

template <typename Element>
void store(const Pages& pages, const Batch& batch, Heads key, Heads value) {
  const int64_t size = pages.page_size;
  Element* keys = static_cast<Element*>(pages.key);
  Element* values = static_cast<Element*>(pages.value);
#pragma omp parallel for schedule(static) if (16 * batch.num_tokens * pages.kv_heads * pages.key_dim >= kWorthThreads)
  for (int64_t task = 0; task < batch.num_tokens * pages.kv_heads; task++) {
    const int64_t token = task / pages.kv_heads, head = task % pages.kv_heads;
    const int64_t page = batch.slots[token] / size * pages.kv_heads + head, offset = batch.slots[token] % size;
    const Element* new_key = static_cast<const Element*>(key.data) + head * key.head_stride + token * key.token_stride;
    const Element* new_value =
        static_cast<const Element*>(value.data) + head * value.head_stride + token * value.token_stride;
    for (int64_t d = 0; d < pages.key_dim; d++) keys[(page * pages.key_dim + d) * size + offset] = new_key[d];
    std::memcpy(values + (page * size + offset) * pages.value_stride, new_value, pages.value_dim * sizeof(Element));
  }
  for (int64_t i = 0; i < batch.num_copies; i++) {
    const int64_t src = batch.copy_src[i] * pages.kv_heads, dst = batch.copy_dst[i] * pages.kv_heads;
    const int64_t slots = batch.copy_slots[i];
    for (int64_t row = 0; row < pages.kv_heads * pages.key_dim; row++)
      std::memcpy(keys + (dst * pages.key_dim + row) * size, keys + (src * pages.key_dim + row) * size,
                  slots * sizeof(Element));
    for (int64_t head = 0; head < pages.kv_heads; head++)
      std::memcpy(values + (dst + head) * size * pages.value_stride, values + (src + head) * size * pages.value_stride,
                  slots * pages.value_stride * sizeof(Element));
  }
}

}  // namespace

extern "C" void batchkv_store(const Pages* pages, const Batch* batch, Heads key, Heads value) {
  if (pages->dtype == kFloat32)
    store<float>(*pages, *batch, key, value);
  else
    store<uint16_t>(*pages, *batch, key, value);
}

extern "C" void batchkv_attend(InstructionSet instruction_set, const Pages* pages, const Batch* batch,
                               int32_t query_heads, Heads query, Heads out, Scoring scoring) {
  switch (instruction_set) {
#ifdef BATCHKV_X86
    case kAvx512:
      return avx512::attend_pages(*pages, *batch, query_heads, query, out, scoring);
    case kAvx2:
      return avx2::attend_pages(*pages, *batch, query_heads, query, out, scoring);
#endif
    default:
      return portable::attend_pages(*pages, *batch, query_heads, query, out, scoring);
  }
}

extern "C" int32_t batchkv_pages_size() { return sizeof(Pages); }
extern "C" int32_t batchkv_batch_size() { return sizeof(Batch); }

extern "C" bool batchkv_supports(InstructionSet instruction_set) {
#ifdef BATCHKV_X86
  __builtin_cpu_init();
  switch (instruction_set) {
    case kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    default:
      return true;
  }
#else
  return instruction_set == kPortable;
#endif
}
