// What all kernels take: the dtype of their tensors and the instructions of the processor.
#pragma once

#include <cstdint>

extern "C" {

enum Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };
enum InstructionSet : int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

// Whether the processor has these instructions.
bool batchkv_supports(InstructionSet instruction_set);
}
