// The C interface of sampling: leads to the kernel of an instruction set, and searches.
#include "isa.h"

DECLARE_KERNEL(void weigh(const Weighing&))

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

extern "C" void batchkv_weigh(InstructionSet instruction_set, const Weighing* weighing) {
  CALL_KERNEL(instruction_set, weigh(*weighing));
}

extern "C" void batchkv_search(const float* weights, const float* sums, const double* uniform, int64_t* tokens,
                               int64_t num_rows, int64_t num_blocks, int64_t block_size) {
  for (int64_t row = 0; row < num_rows; row++) {
    const Found block = invert(sums + row * num_blocks, num_blocks, uniform[row]);
    const float* of_block = weights + (row * num_blocks + block.index) * block_size;
    tokens[row] = block.index * block_size + invert(of_block, block_size, block.within).index;
  }
}

extern "C" int32_t batchkv_weighing_size() { return sizeof(Weighing); }
