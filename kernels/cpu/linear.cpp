// The C interface of linear layers: leads to the kernel of an instruction set.
#include "isa.h"

#define DECLARE(ISA) \
  namespace ISA {    \
  void linear_layer(const Linear&); \
  }
DECLARE(portable)
DECLARE(avx2)
DECLARE(avx512)

extern "C" void batchkv_linear(InstructionSet instruction_set, const Linear* linear) {
  switch (instruction_set) {
#ifdef BATCHKV_X86
    case kAvx512:
      return avx512::linear_layer(*linear);
    case kAvx2:
      return avx2::linear_layer(*linear);
#endif
    default:
      return portable::linear_layer(*linear);
  }
}

extern "C" int32_t batchkv_linear_size() { return sizeof(Linear); }
