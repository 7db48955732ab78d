// The kernels for x86 with AVX2 and FMA.
#include "isa.h"

#ifdef BATCHKV_X86
#pragma GCC target("avx2,fma")
#define ISA avx2
#define VECTOR_FLOATS 8
#include "vectors.h"
#include "room.h"
#include "activation_impl.h"
#include "attention_task.h"
#include "attention_impl.h"
#include "linear_impl.h"
#include "norm_impl.h"
#include "rotary_impl.h"
#include "decoder_impl.h"
#include "sampling_impl.h"
#endif
