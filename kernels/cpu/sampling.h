// Sampling from the logits of a vocabulary on a CPU: the C interface. All tensors but the logits are contiguous.
#pragma once

#include "processor.h"

extern "C" {

// What tokens weigh beside the likeliest ones of their rows: weights[r][v] = exp((logits[r][v] - best[r]) / temperature[r])
// for v < size, and 0 behind that. Where `best` is not finite there is no distribution, and all else is anything. A row's
// bits depend on nothing but the row.
struct Weighing {
  const void* logits;        // [num_rows][logits_stride], of which `size` are read
  const float* temperature;  // [num_rows]
  float* weights;            // [num_rows][padded_size]
  float* best;               // [num_rows], the greatest logits; NaN where there is one
  int64_t* likeliest;        // [num_rows], the first tokens that have them
  int64_t logits_stride;
  int64_t size;
  int64_t num_rows;
  int64_t padded_size;       // a multiple of 16
  int32_t dtype;             // of logits
};

void batchkv_weigh(InstructionSet instruction_set, const Weighing* weighing);

// The tokens where the CDF of each row's weights passes `uniform`, in [0, 1): first the block, by the sums of blocks, then
// the token. They have a weight above 0 if any of the row has.
//     weights  [num_rows][num_blocks][block_size]
//     sums     [num_rows][num_blocks]
void batchkv_search(const float* weights, const float* sums, const double* uniform, int64_t* tokens, int64_t num_rows,
                    int64_t num_blocks, int64_t block_size);

// sizeof(Weighing): a caller that was written for another must not go on.
int32_t batchkv_weighing_size();
}
