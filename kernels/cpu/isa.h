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

constexpr int64_t kWorthThreads = 4096;  // elements of a step below which waking other threads takes longer than the work
