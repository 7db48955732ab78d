// Sampling from the logits of a vocabulary on a CPU: the C interface. All tensors but the logits are contiguous.
#pragma once

#include "processor.h"

extern "C" {

// weights[r][v] = exp((logits[r][v] - best[r]) / temperature[r]) for v < size, and 0 behind that, where best[r] is the
// greatest logit of the row. (Where that is not finite there is no distribution, and weights are anything.) A row's bits
// depend on nothing but the row.
//     logits   [num_rows][logits_stride]
//     weights  [num_rows][padded_size], a multiple of 16
void batchkv_weigh(InstructionSet instruction_set, const float* logits, int64_t logits_stride, int64_t size,
                   const float* best, const float* temperature, float* weights, int64_t padded_size, int64_t num_rows);

// The tokens where the CDF of each row's weights passes `uniform`, in [0, 1): first the block, by the sums of blocks, then
// the token. They have a weight above 0 if any of the row has.
//     weights  [num_rows][num_blocks][block_size]
//     sums     [num_rows][num_blocks]
void batchkv_search(const float* weights, const float* sums, const double* uniform, int64_t* tokens, int64_t num_rows,
                    int64_t num_blocks, int64_t block_size);
}
