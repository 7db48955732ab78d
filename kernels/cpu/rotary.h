// Rotary embeddings on a CPU: the C interface.
#pragma once

#include "attention.h"

extern "C" {

// turned[i] = heads[i] * cos[i] + half[i] * sin[i], with half = (-heads[dim / 2 ...], heads[... dim / 2]), as in Llama; both
// products are rounded to the dtype before they are added. All are fp32, or all bf16. An element's bits depend on nothing
// but what it is computed from.
struct Rotary {
  Heads query, key;                // [heads][tokens][dim]
  Heads turned_query, turned_key;  // may be those themselves
  const void* cos;                 // [tokens][dim]
  const void* sin;
  int64_t num_tokens;
  int32_t query_heads;
  int32_t key_heads;
  int32_t dim;                     // even
  int32_t dtype;
};

void batchkv_rotate(InstructionSet instruction_set, const Rotary* rotary);

// sizeof(Rotary): a caller that was written for another must not go on.
int32_t batchkv_rotary_size();
}
