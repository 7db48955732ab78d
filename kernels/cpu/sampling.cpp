// The C interface of sampling: leads to the kernel of an instruction set, and searches.
#include "isa.h"

DECLARE_KERNEL(void weigh(const Vocabulary&))

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

extern "C" void batchkv_weigh(InstructionSet instruction_set, const Vocabulary* vocabulary) {
  CALL_KERNEL(instruction_set, weigh(*vocabulary));
}

extern "C" void batchkv_search(const Vocabulary* vocabulary) {
  const int64_t blocks = vocabulary->num_blocks, size = vocabulary->block_size;
  for (int64_t row = 0; row < vocabulary->num_rows; row++) {
    const Found block = invert(vocabulary->sums + row * blocks, blocks, vocabulary->uniform[row]);
    const float* weights = vocabulary->weights + (row * blocks + block.index) * size;
    vocabulary->tokens[row] = block.index * size + invert(weights, size, block.within).index;
  }
}

extern "C" int32_t batchkv_vocabulary_size() { return sizeof(Vocabulary); }
