// RMS norms on a CPU: the C interface.
#pragma once

#include "processor.h"

extern "C" {

struct Norm {
  const void* weight;
  float epsilon;
};

// out[r][i] = weight[i] * (rows[r][i] / sqrt(mean over j of rows[r][j]^2 + epsilon)), computed in fp32; the bracket is
// rounded to the dtype first, as in Llama. All are fp32, or all bf16, and contiguous; `out` may be `rows`. A row's bits
// depend on nothing but the row and the weight.
void batchkv_rms_norm(InstructionSet instruction_set, const void* rows, const void* weight, void* out, int64_t num_rows,
                      int64_t width, float epsilon, int32_t dtype);
}
