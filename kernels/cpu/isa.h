// What the instruction sets have in common: the standard headers, which must not be compiled for a special target.
#pragma once

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "activation.h"
#include "attention.h"
#include "decoder.h"
#include "linear.h"
#include "norm.h"
#include "rotary.h"
#include "sampling.h"

// Only GCC takes the instruction set of a function from a pragma; other compilers build the portable kernel.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define BATCHKV_X86
#endif
// Tiles have to be asked for, which is done as Linux wants it.
#if defined(BATCHKV_X86) && defined(__linux__) && __GNUC__ >= 11
#define BATCHKV_TILES
#endif

// Kernels are in a namespace for each instruction set: this declares one in all of them, and the next calls that of the
// instruction set in question.
#define DECLARE_KERNEL(signature) \
  namespace portable {            \
  signature;                      \
  }                               \
  namespace avx2 {                \
  signature;                      \
  }                               \
  namespace avx512 {              \
  signature;                      \
  }                               \
  namespace amx {                 \
  signature;                      \
  }
#ifdef BATCHKV_TILES
#define CALL_TILES(instruction_set, call) (instruction_set) == kAmx ? amx::call:
#else
#define CALL_TILES(instruction_set, call)
#endif
#ifdef BATCHKV_X86
#define CALL_KERNEL(instruction_set, call)               \
  (CALL_TILES(instruction_set, call)                     \
   (instruction_set) == kAvx512 ? avx512::call           \
   : (instruction_set) == kAvx2 ? avx2::call             \
                                : portable::call)
#else
#define CALL_KERNEL(instruction_set, call) portable::call
#endif

// What keys, values, queries and results are outside the pages that keep them as `Element`.
template <typename Element>
struct TensorOf {
  using type = Element;
};
template <>
struct TensorOf<int8_t> {
  using type = float;
};

constexpr int64_t kWorthThreads = 1 << 16;  // multiplications below which waking other threads takes longer than the work
