// Activations on a CPU: the C interface.
#pragma once

#include "processor.h"

extern "C" {

enum ActivationKind : int32_t { kSilu = 0, kGeluTanh = 1 };

// out[i] = rows[i] * sigmoid(gate(rows[i])), computed in fp32, with gate(x) = x for SiLU, and for GELU
// 2 sqrt(2 / pi) (x + 0.044715 x^3), by which x sigmoid(gate(x)) = x (1 + tanh(gate(x) / 2)) / 2. Both are fp32, or both
// bf16, and contiguous. An element's bits depend on nothing but the element.
void batchkv_activate(InstructionSet instruction_set, ActivationKind kind, const void* rows, void* out, int64_t size,
                      int32_t dtype);
}
