// Weights of a vocabulary's tokens, once for vectors of any width (vectors.h).

namespace ISA {

void weigh_row(const float* logits, int64_t size, float best, float temperature, float* weights, int64_t padded_size) {
  for (int64_t i = 0; i < padded_size; i += VECTOR_FLOATS) {
    Vec logit = all(-INFINITY);
    if (i + VECTOR_FLOATS <= size)
      logit = load(logits + i);
    else
      for (int lane = 0; i + lane < size; lane++) logit[lane] = logits[i + lane];
    store(weights + i, exp_nonpositive((logit - best) / temperature));
  }
}

void weigh(const Vocabulary& vocabulary) {
  const int64_t padded_size = vocabulary.num_blocks * vocabulary.block_size;
#pragma omp parallel for schedule(static) if (vocabulary.num_rows * vocabulary.size >= kWorthThreads)
  for (int64_t row = 0; row < vocabulary.num_rows; row++)
    weigh_row(vocabulary.logits + row * vocabulary.logits_stride, vocabulary.size, vocabulary.best[row],
              vocabulary.temperature[row], vocabulary.weights + row * padded_size, padded_size);
}

}  // namespace ISA
