// What the instruction sets have in common: the standard headers, which must not be compiled for a special target.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "attention.h"

// Only GCC takes the instruction set of a function from a pragma; other compilers build the portable kernel.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define BATCHKV_X86
#endif

constexpr int64_t kWorthThreads = 1 << 16;  // multiplications below which waking other threads takes longer than the work
