// Vectors of VECTOR_FLOATS floats, and the product of matrices that all kernels are made of. Each instruction set includes
// this and the kernels in a namespace of its own (ISA), after the standard headers, with the compiler set to its target.

namespace ISA {

typedef float Vec __attribute__((vector_size(4 * VECTOR_FLOATS)));
typedef float VecLoad __attribute__((vector_size(4 * VECTOR_FLOATS), aligned(4), may_alias));
typedef int32_t VecInt __attribute__((vector_size(4 * VECTOR_FLOATS)));
typedef uint32_t VecBits __attribute__((vector_size(4 * VECTOR_FLOATS)));
typedef int8_t VecByte __attribute__((vector_size(VECTOR_FLOATS)));
typedef uint16_t VecHalf __attribute__((vector_size(2 * VECTOR_FLOATS)));

constexpr int kLanes = 16;                        // columns of a product taken at once: keys, value dims or output features
constexpr int kVecs = kLanes / VECTOR_FLOATS;     // vectors that hold them
constexpr int kMostRows = 12 / kVecs;             // rows in registers at once: 12 accumulators

constexpr float kLog2E = 1.44269504088896341f;

inline Vec load(const float* at) { return *reinterpret_cast<const VecLoad*>(at); }
inline void store(float* at, Vec value) { *reinterpret_cast<VecLoad*>(at) = value; }
inline Vec all(float value) { return value - Vec{}; }

inline float to_float(float value) { return value; }
inline float to_float(uint16_t bf16) {
  uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float to_float(int8_t value) { return value; }
inline void from_float(float value, float* out) { *out = value; }
inline void from_float(float value, uint16_t* out) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  *out = value != value ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e^x for x <= 0, within 2 ulp; 0 below -87. Cody-Waite reduction, then the Taylor polynomial on |r| <= ln2/2.
inline Vec exp_nonpositive(Vec x) {
  const Vec round = all(12582912.0f);  // 1.5 * 2^23: adding it leaves the integer in the low bits
  const VecInt is_zero = x < -87.0f;
  x = x < -87.0f ? all(-87.0f) : x;  // NaN stays
  Vec n = (x * kLog2E + round) - round;
  Vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = all(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  VecInt exponent = (__builtin_convertvector(n, VecInt) + 127) << 23;
  Vec power;
  std::memcpy(&power, &exponent, sizeof(power));
  return is_zero ? Vec{} : p * power;
}

// Between -limit and limit; NaN stays.
inline Vec clamped(Vec x, float limit) {
#if VECTOR_FLOATS == 16
  return (Vec)_mm512_max_ps((__m512)all(-limit), _mm512_min_ps((__m512)all(limit), (__m512)x));  // takes the second if NaN
#else
  x = x < -limit ? all(-limit) : x;
  return x > limit ? all(limit) : x;
#endif
}

// number * 2^exponent for whole exponents of at most 250; 0 and infinity at the ends.
inline Vec scaled(Vec number, Vec exponent) {
#if VECTOR_FLOATS == 16
  return (Vec)_mm512_scalef_ps((__m512)number, (__m512)exponent);
#else
  const VecInt whole = __builtin_convertvector(exponent, VecInt), half = whole >> 1;
  const VecInt powers[] = {(half + 127) << 23, (whole - half + 127) << 23};
  Vec factors[2];
  std::memcpy(factors, powers, sizeof(factors));
  return number * factors[0] * factors[1];
#endif
}

// 2^x within 3e-6 of it (a fit with 1 at 0), which is enough for what is rounded to bf16; 0 and infinity at the ends.
inline Vec exp2_roughly(Vec x) {
  const Vec round = all(12582912.0f);  // as in exp_nonpositive
  x = clamped(x, 250);
  const Vec n = (x + round) - round, r = x - n;
  Vec p = all(0.009582852944731712f);
  p = p * r + 0.055906426161527634f;
  p = p * r + 0.24024099111557007f;
  p = p * r + 0.6931241750717163f;
  p = p * r + 1.0f;
  return scaled(p, n);
}

// A vector of elements, as floats.
inline Vec load_floats(const float* from) { return load(from); }
inline Vec load_floats(const uint16_t* from) {
  VecHalf half;
  std::memcpy(&half, from, sizeof(half));
#if VECTOR_FLOATS == 16  // GCC takes five instructions for it
  const VecBits bits = (VecBits)_mm512_cvtepu16_epi32((__m256i)half) << 16;
#else
  const VecBits bits = __builtin_convertvector(half, VecBits) << 16;
#endif
  Vec floats;
  std::memcpy(&floats, &bits, sizeof(floats));
  return floats;
}
inline Vec load_floats(const int8_t* from) {
  VecByte bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(__builtin_convertvector(bytes, VecInt), Vec);
}

// kLanes elements to floats.
template <typename Element>
inline void widen(const Element* from, float* to) {
  for (int i = 0; i < kLanes; i += VECTOR_FLOATS) store(to + i, load_floats(from + i));
}

// A vector of floats as elements, rounded as by from_float.
inline void store_floats(Vec floats, float* to) { store(to, floats); }
inline void store_floats(Vec floats, uint16_t* to) {
#ifdef BATCHKV_IN_TILES  // there is an instruction for it
  const __m256bh half = _mm512_cvtneps_pbh((__m512)floats);
  std::memcpy(to, &half, sizeof(half));
#else
  VecBits bits;
  std::memcpy(&bits, &floats, sizeof(bits));
  const VecBits nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const VecHalf half = __builtin_convertvector(floats == floats ? nearest : 0x7fc0 - VecBits{}, VecHalf);
  std::memcpy(to, &half, sizeof(half));
#endif
}

// What is left of floats that are stored as elements.
template <typename Element>
inline Vec rounded(Vec floats) {
  if constexpr (std::is_same_v<Element, float>) return floats;
  Element elements[VECTOR_FLOATS];
  store_floats(floats, elements);
  return load_floats(elements);
}

// Takes elements from two vectors: from `low` where bit kDistance of the place is 0, else from `high`. kOffset is 0 or
// kDistance: how far up in them it starts.
template <int kDistance, int kOffset, int... I>
inline Vec interleave(Vec low, Vec high, std::integer_sequence<int, I...>) {
#ifdef __clang__
  return __builtin_shufflevector(low, high, (I & kDistance ? VECTOR_FLOATS + I - kDistance : I) + kOffset...);
#else
  return __builtin_shuffle(low, high, VecInt{(I & kDistance ? VECTOR_FLOATS + I - kDistance : I) + kOffset...});
#endif
}

// Transposes a square of vectors: bit after bit of the row's number becomes that of the column's.
template <int kDistance = 1>
inline void transpose(Vec (&square)[VECTOR_FLOATS]) {
  constexpr std::make_integer_sequence<int, VECTOR_FLOATS> indices;
#pragma GCC unroll 16
  for (int i = 0; i < VECTOR_FLOATS; i++)
    if (!(i & kDistance)) {
      const Vec low = square[i], high = square[i + kDistance];
      square[i] = interleave<kDistance, 0>(low, high, indices);
      square[i + kDistance] = interleave<kDistance, kDistance>(low, high, indices);
    }
  if constexpr (2 * kDistance < VECTOR_FLOATS) transpose<2 * kDistance>(square);
}

// Rows of the left side of a product: one after the other, or in strips of kMostRows, in which what is multiplied by the
// same row of the right side lies side by side.
struct Rows {
  const float* base;
  int64_t stride;
  float operator()(int r, int i) const { return base[r * stride + i]; }
  Rows after(int rows) const { return {base + rows * stride, stride}; }
};
struct Strips {
  const float* base;
  int64_t depth;
  float operator()(int r, int i) const { return base[i * kMostRows + r]; }
  Strips after(int rows) const { return {base + rows * depth, depth}; }  // whole strips
};

// Rows of the right side: evenly spaced, or anywhere.
template <typename Element>
struct Strided {
  const Element* base;
  int64_t stride;
  const Element* operator[](int i) const { return base + i * stride; }
};
template <typename Element>
struct Listed {
  const Element* const* rows;
  int64_t offset;
  const Element* operator[](int i) const { return rows[i] + offset; }
};

// out[r][0, 16) (+)= sum over i < depth of left(r, i) * right[i][0, 16), for R rows.
template <int R, bool kAccumulate, typename Left, typename Right>
inline void multiply_rows(Left left, Right right, int depth, float* out, int64_t out_stride) {
  Vec sum[R][kVecs];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; v++) sum[r][v] = kAccumulate ? load(out + r * out_stride + v * VECTOR_FLOATS) : Vec{};
  for (int i = 0; i < depth; i++) {
    const auto* row = right[i];
    Vec b[kVecs];
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; v++) b[v] = load_floats(row + v * VECTOR_FLOATS);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      Vec a = all(left(r, i));
#pragma GCC unroll 16
      for (int v = 0; v < kVecs; v++) sum[r][v] = a * b[v] + sum[r][v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 16
    for (int v = 0; v < kVecs; v++) store(out + r * out_stride + v * VECTOR_FLOATS, sum[r][v]);
}

// The same for any number of rows.
template <bool kAccumulate, typename Left, typename Right, int R = kMostRows>
inline void multiply(Left left, Right right, int depth, float* out, int64_t out_stride, int rows) {
  for (; rows >= R; rows -= R, left = left.after(R), out += R * out_stride)
    multiply_rows<R, kAccumulate>(left, right, depth, out, out_stride);
  if constexpr (R > 1) {
    if (rows) multiply<kAccumulate, Left, Right, R - 1>(left, right, depth, out, out_stride, rows);
  }
}

}  // namespace ISA
