// The kernels for x86 with AMX: those for AVX-512, and products of bf16 in tiles.
#include "isa.h"

#ifdef BATCHKV_TILES
#include <immintrin.h>
#pragma GCC target("amx-tile,amx-bf16,avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,prefer-vector-width=512")
#define ISA amx
#define VECTOR_FLOATS 16
#define BATCHKV_IN_TILES
#include "vectors.h"
#include "room.h"
#include "activation_impl.h"
#include "attention_task.h"
#include "tiles.h"
#include "attention_tiles.h"
#include "attention_impl.h"
#include "linear_tiles.h"
#include "linear_impl.h"
#include "norm_impl.h"
#include "rotary_impl.h"
#include "decoder_impl.h"
#include "sampling_impl.h"
#endif
