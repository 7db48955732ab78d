// Asks the processor.
#include "isa.h"

extern "C" bool batchkv_supports(InstructionSet instruction_set) {
#ifdef BATCHKV_X86
  __builtin_cpu_init();
  switch (instruction_set) {
    case kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    default:
      return true;
  }
#else
  return instruction_set == kPortable;
#endif
}
