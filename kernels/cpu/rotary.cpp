// The C interface of rotary embeddings: leads to the kernel of an instruction set.
#include "isa.h"

DECLARE_KERNEL(void rotate(const Rotary&))

extern "C" void batchkv_rotate(InstructionSet instruction_set, const Rotary* rotary) {
  CALL_KERNEL(instruction_set, rotate(*rotary));
}

extern "C" int32_t batchkv_rotary_size() { return sizeof(Rotary); }
