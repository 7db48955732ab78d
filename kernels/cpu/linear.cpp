// The C interface of linear layers: leads to the kernel of an instruction set.
#include "isa.h"

DECLARE_KERNEL(void linear_layer(const Linear&))

extern "C" void batchkv_linear(InstructionSet instruction_set, const Linear* linear) {
  CALL_KERNEL(instruction_set, linear_layer(*linear));
}

extern "C" int32_t batchkv_linear_size() { return sizeof(Linear); }
