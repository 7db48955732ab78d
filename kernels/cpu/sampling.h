// Sampling from the logits of a vocabulary on a CPU: the C interface.
#pragma once

#include "processor.h"

extern "C" {

// Rows of a vocabulary, in blocks: all tensors but the logits are contiguous.
struct Vocabulary {
  const float* logits;      // [num_rows][logits_stride]
  const float* best;        // [num_rows], the greatest logit of each
  const float* temperature; // [num_rows]
  float* weights;           // [num_rows][num_blocks][block_size], exp((logit - best) / temperature), 0 behind the end
  float* sums;              // [num_rows][num_blocks], of the weights
  const double* uniform;    // [num_rows], in [0, 1)
  int64_t* tokens;          // [num_rows]
  int64_t num_rows;
  int64_t logits_stride;
  int64_t size;             // logits of a row
  int64_t num_blocks;
  int32_t block_size;       // a multiple of 16
};

// Fills in the weights. A row's bits depend on nothing but the row.
void batchkv_weigh(InstructionSet instruction_set, const Vocabulary* vocabulary);

// Inverts the CDF of the weights at the uniform of each row: fills in the tokens, which have a weight above 0 if any of
// the row has.
void batchkv_search(const Vocabulary* vocabulary);

// sizeof(Vocabulary): a caller that was written for another must not go on.
int32_t batchkv_vocabulary_size();
}
