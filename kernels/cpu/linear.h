// Linear layers on a CPU: the C interface.
#pragma once

#include "activation.h"

extern "C" {

// out[r][n] = bias[n] + sum over k of rows[r][k] * weight[n][k], summed in fp32. All are fp32, or all bf16. Only weights
// may have a stride, in elements, as they have in a part of a larger one. There is at least one input and one output
// feature. With a gate, out[r][n] is multiplied by the activation of what the gate makes of rows[r]; the two, and the
// activation, are rounded to the dtype before, as three layers one after the other would.
struct Linear {
  const void* rows;    // [num_rows][in_features]
  const void* weight;  // [out_features][in_features]
  const void* bias;    // [out_features] or null; null with a gate
  const void* gate;    // [out_features][in_features] or null
  void* out;           // [num_rows][out_features]
  float* strips;       // room for the rows as floats: a multiple of 48 of them, with a multiple of 32 features
  int64_t num_rows;
  int64_t in_features;
  int64_t out_features;
  int64_t weight_stride;
  int64_t gate_stride;
  ActivationKind activation;  // of the gate
  int32_t dtype;
};

// A row's result depends on nothing but the row, the weight and the bias: it is summed over k in an
// order that is the same for all rows (with AVX-512 and less, ascending).
void batchkv_linear(InstructionSet instruction_set, const Linear* linear);

// sizeof(Linear): a caller that was written for another must not go on.
int32_t batchkv_linear_size();
}
