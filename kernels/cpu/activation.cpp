// The C interface of activations: leads to the kernel of an instruction set.
#include "isa.h"

DECLARE_KERNEL(void activate(ActivationKind, const void*, void*, int64_t, int32_t))

extern "C" void batchkv_activate(InstructionSet instruction_set, ActivationKind kind, const void* rows, void* out,
                                 int64_t size, int32_t dtype) {
  CALL_KERNEL(instruction_set, activate(kind, rows, out, size, dtype));
}
