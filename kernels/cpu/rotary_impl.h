// Rotary embeddings, once for vectors of any width (vectors.h).

namespace ISA {

// One half of a head: `other` is the other half, or its negative.
template <typename Element>
inline Vec turned(Vec own, Vec other, const Element* cos, const Element* sin) {
  return rounded<Element>(own * load_floats(cos)) + rounded<Element>(other * load_floats(sin));
}

template <typename Element>
void turn_head(const Element* from, Element* to, const Element* cos, const Element* sin, int half) {
  int i = 0;
  for (; i + VECTOR_FLOATS <= half; i += VECTOR_FLOATS) {
    const Vec low = load_floats(from + i), high = load_floats(from + half + i);
    store_floats(turned(low, -high, cos + i, sin + i), to + i);
    store_floats(turned(high, low, cos + half + i, sin + half + i), to + half + i);
  }
  if (i == half) return;
  const int rest = half - i;  // the last ones go through the same code
  Element numbers[4][2 * VECTOR_FLOATS] = {};
  const Element* all[] = {from, cos, sin};
  for (int n = 0; n < 3; n++)
    for (int part : {0, 1}) std::copy_n(all[n] + part * half + i, rest, numbers[n] + part * VECTOR_FLOATS);
  turn_head(numbers[0], numbers[3], numbers[1], numbers[2], VECTOR_FLOATS);
  for (int part : {0, 1}) std::copy_n(numbers[3] + part * VECTOR_FLOATS, rest, to + part * half + i);
}

template <typename Element>
void turn_heads(const Rotary& rotary, Heads heads, Heads turned, int count, int64_t token) {
  const int64_t at = token * rotary.dim;
  for (int head = 0; head < count; head++)
    turn_head(static_cast<const Element*>(heads.data) + head * heads.head_stride + token * heads.token_stride,
              static_cast<Element*>(turned.data) + head * turned.head_stride + token * turned.token_stride,
              static_cast<const Element*>(rotary.cos) + at, static_cast<const Element*>(rotary.sin) + at, rotary.dim / 2);
}

template <typename Element>
void turn_tokens(const Rotary& rotary) {
  const int64_t heads = rotary.query_heads + rotary.key_heads;
#pragma omp parallel for schedule(static) if (rotary.num_tokens * heads * rotary.dim >= kWorthThreads)
  for (int64_t token = 0; token < rotary.num_tokens; token++) {
    turn_heads<Element>(rotary, rotary.query, rotary.turned_query, rotary.query_heads, token);
    turn_heads<Element>(rotary, rotary.key, rotary.turned_key, rotary.key_heads, token);
  }
}

void rotate(const Rotary& rotary) {
  (rotary.dtype == kFloat32 ? turn_tokens<float> : turn_tokens<uint16_t>)(rotary);
}

}  // namespace ISA
