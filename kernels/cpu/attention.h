// Attention over paged keys and values on a CPU: the C interface.
//
// Pages of a layer lie one after the other:
//     kKeysSideBySide, so that a vector holds one dim of many keys, or many dims of a value:
//         key    [pages][kv_heads][key_dim][page_size]
//         value  [pages][kv_heads][page_size][value_stride]  value_stride is value_dim rounded up
//     kValuesSideBySide, so that a row of a tile holds many dims of a key, or one dim of many values (bf16, and AMX):
//         key    [pages][kv_heads][page_size][key_dim]       key_dim is a multiple of 32
//         value  [pages][kv_heads][value_stride][page_size]
// A slot is page * page_size + offset in the page. All strides are in elements; head dims are contiguous.
//     scales [pages][kv_heads][page_size]                of int8 keys and of int8 values (kernels/quantization.py); fp32
// Elements are fp32, bf16 or int8; whatever they are, all arithmetic is fp32, but that tiles take weights rounded to bf16.
#pragma once

#include "processor.h"

extern "C" {

enum Layout : int32_t { kKeysSideBySide = 0, kValuesSideBySide = 1 };

// The pages of one layer.
struct Pages {
  void* key;
  void* value;
  float* key_scale;    // null unless int8, as is the next
  float* value_scale;
  int32_t dtype;
  int32_t page_size;
  int32_t kv_heads;
  int32_t key_dim;
  int32_t value_dim;
  int32_t value_stride;
  Layout layout;
};

// What one step attends to; the same for all layers of a group.
struct Batch {
  int64_t num_tokens;
  int64_t table_width;
  const int32_t* page_table;  // [rows][table_width]; entries that no token of the row can see are not read from memory
  const int32_t* token_row;   // [num_tokens], ascending
  const int32_t* position;    // [num_tokens], absolute; consecutive within a row
  const int64_t* slots;       // [num_tokens]
  int64_t num_copies;
  const int32_t* copy_src;    // [num_copies] pages
  const int32_t* copy_dst;    // [num_copies]
  const int32_t* copy_slots;  // [num_copies], how many slots of the page are copied: the first ones
  int32_t window;             // a query at p sees keys in (p - window, p]; 0: all up to p
};

// A tensor [heads][tokens][dim] of the pages' dtype, or of fp32 where that is int8.
struct Heads {
  void* data;
  int64_t head_stride;
  int64_t token_stride;
};

struct Scoring {
  float scale;         // positive
  float softcap;       // 0: none
  const float* sinks;  // [query heads] or null
};

// Writes the keys and values of the step to their slots, then makes the copies in the given order.
void batchkv_store(const Pages* pages, const Batch* batch, Heads key, Heads value);

// out = softmax(mask(cap(scale * q k^T))) v for every token and query head. A token's result depends on nothing but its own
// query, keys and values: keys are taken in blocks on a grid of absolute positions, in ascending order.
void batchkv_attend(InstructionSet instruction_set, const Pages* pages, const Batch* batch, int32_t query_heads,
                    Heads query, Heads out, Scoring scoring);

// sizeof(Pages) and sizeof(Batch): a caller that was written for others must not go on.
int32_t batchkv_pages_size();
int32_t batchkv_batch_size();
}
