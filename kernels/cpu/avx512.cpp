// The kernels for x86 with AVX-512.
#include "isa.h"

#ifdef BATCHKV_X86
#include <immintrin.h>
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
#define ISA avx512
#define VECTOR_FLOATS 16
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
