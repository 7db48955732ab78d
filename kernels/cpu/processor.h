// What all kernels take: the dtype of their tensors and the instructions of the processor.
#pragma once

#include <cstdint>

extern "C" {

enum Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2 };
enum InstructionSet : int32_t { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAmx = 3 };

// Whether the processor has these instructions, and the system lets this process use them. To be asked before they are
// used: tiles are only there for who has asked.
bool batchkv_supports(InstructionSet instruction_set);
}
