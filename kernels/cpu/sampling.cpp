// The C interface of sampling: leads to the kernel of an instruction set, and searches.
#include "isa.h"

DECLARE_KERNEL(void weigh(const float*, int64_t, int64_t, const float*, const float*, float*, int64_t, int64_t))

namespace {

struct Found {
  int64_t index;
  double within;  // how far into the entry, in [0, 1]
};

// Where `uniform` falls in the CDF of weights.
Found invert(const float* weights, int64_t count, double uniform) {
  double total = 0;
  for (int64_t i = 0; i < count; i++) total += weights[i];
  const double target = std::min(uniform * total, std::nextafter(total, 0.0));
  double end = 0;
  for (int64_t i = 0; i < count; i++) {
    end += weights[i];
    if (end > target) return {i, std::clamp(1 - (end - target) / weights[i], 0.0, 1.0)};
  }
  return {0, 0};  // no weights, or NaN: not a distribution
}

}  // namespace

extern "C" void batchkv_weigh(InstructionSet instruction_set, const float* logits, int64_t logits_stride, int64_t size,
                              const float* best, const float* temperature, float* weights, int64_t padded_size,
                              int64_t num_rows) {
  CALL_KERNEL(instruction_set, weigh(logits, logits_stride, size, best, temperature, weights, padded_size, num_rows));
}

extern "C" void batchkv_search(const float* weights, const float* sums, const double* uniform, int64_t* tokens,
                               int64_t num_rows, int64_t num_blocks, int64_t block_size) {
  for (int64_t row = 0; row < num_rows; row++) {
    const Found block = invert(sums + row * num_blocks, num_blocks, uniform[row]);
    const float* of_block = weights + (row * num_blocks + block.index) * block_size;
    tokens[row] = block.index * block_size + invert(of_block, block_size, block.within).index;
  }
}
