// The C interface of norms: leads to the kernel of an instruction set.
#include "isa.h"

DECLARE_KERNEL(void rms_norm(const void*, const void*, void*, int64_t, int64_t, float, int32_t))

extern "C" void batchkv_rms_norm(InstructionSet instruction_set, const void* rows, const void* weight, void* out,
                                 int64_t num_rows, int64_t width, float epsilon, int32_t dtype) {
  CALL_KERNEL(instruction_set, rms_norm(rows, weight, out, num_rows, width, epsilon, dtype));
}
