// Activations, once for vectors of any width (vectors.h).

namespace ISA {

constexpr int64_t kActivationBlock = 4096;  // elements of a task

// x / (1 + e^-gate). What is rounded to bf16 needs fewer digits; else e^-|gate| is taken, which is never too large.
template <typename Element>
inline Vec through_sigmoid(Vec x, Vec gate) {
  if constexpr (std::is_same_v<Element, uint16_t>) return x / (1 + exp2_roughly(gate * -kLog2E));
  const Vec power = exp_nonpositive(gate < 0 ? gate : -gate);
  return x * ((gate < 0 ? power : all(1)) / (1 + power));
}

template <ActivationKind kKind, typename Element>
inline Vec activated(Vec x) {
  const float twice_root = 1.5957691216057308f;  // 2 sqrt(2 / pi)
  return through_sigmoid<Element>(x, kKind == kSilu ? x : twice_root * (x + 0.044715f * x * x * x));
}

// What a gate lets through of x. Everything is rounded to the dtype where torch would store it.
template <typename Element>
inline Vec gated(ActivationKind kind, Vec gate, Vec x) {
  gate = rounded<Element>(gate);
  gate = kind == kSilu ? activated<kSilu, Element>(gate) : activated<kGeluTanh, Element>(gate);
  return rounded<Element>(gate) * rounded<Element>(x);
}

template <ActivationKind kKind, typename Element>
void activate_block(const Element* rows, Element* out, int64_t size) {
  int64_t i = 0;
  for (; i + VECTOR_FLOATS <= size; i += VECTOR_FLOATS)
    store_floats(activated<kKind, Element>(load_floats(rows + i)), out + i);
  if (i == size) return;
  Element rest[VECTOR_FLOATS] = {};  // the last ones go through the same code
  std::copy(rows + i, rows + size, rest);
  activate_block<kKind>(rest, rest, VECTOR_FLOATS);
  std::copy(rest, rest + size - i, out + i);
}

template <ActivationKind kKind, typename Element>
void activate_all(const void* rows, void* out, int64_t size) {
#pragma omp parallel for schedule(static) if (size >= kWorthThreads)
  for (int64_t begin = 0; begin < size; begin += kActivationBlock)
    activate_block<kKind>(static_cast<const Element*>(rows) + begin, static_cast<Element*>(out) + begin,
                          std::min(kActivationBlock, size - begin));
}

void activate(ActivationKind kind, const void* rows, void* out, int64_t size, int32_t dtype) {
  const auto run = kind == kSilu ? (dtype == kFloat32 ? activate_all<kSilu, float> : activate_all<kSilu, uint16_t>)
                                 : (dtype == kFloat32 ? activate_all<kGeluTanh, float> : activate_all<kGeluTanh, uint16_t>);
  run(rows, out, size);
}

}  // namespace ISA
