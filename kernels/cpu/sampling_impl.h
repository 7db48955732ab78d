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

void weigh(const float* logits, int64_t logits_stride, int64_t size, const float* best, const float* temperature,
           float* weights, int64_t padded_size, int64_t num_rows) {
#pragma omp parallel for schedule(static) if (num_rows * size >= kWorthThreads)
  for (int64_t row = 0; row < num_rows; row++)
    weigh_row(logits + row * logits_stride, size, best[row], temperature[row], weights + row * padded_size, padded_size);
}

}  // namespace ISA
