// Asks the processor.
#include "isa.h"

#ifdef BATCHKV_TILES
#include <sys/syscall.h>
#include <unistd.h>

// Linux gives a process the state of tiles when it asks for it (arch_prctl(2), Documentation/arch/x86/xstate.rst).
static bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

extern "C" bool batchkv_supports(InstructionSet instruction_set) {
#ifdef BATCHKV_X86
  __builtin_cpu_init();
  switch (instruction_set) {
#ifdef BATCHKV_TILES
    case kAmx:
      return batchkv_supports(kAvx512) && __builtin_cpu_supports("avx512bf16") &&
             __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && may_use_tiles();
#endif
    case kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    default:
      return instruction_set == kPortable;
  }
#else
  return instruction_set == kPortable;
#endif
}
