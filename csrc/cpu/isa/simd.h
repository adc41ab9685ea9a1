// Arithmetic of vectors, and loops over rows by whole and partial ones.
#pragma once

#include <utility>

#include "cpu/isa/vectors.h"

namespace mittens::cpu::MITTENS_ISA {

// ---- arithmetic ----

MITTENS_INLINE Float fma(Float x, Float y, Float z) {
#if defined(__AVX512F__)
  return (Float)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__AVX2__)
  return (Float)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(__ARM_NEON)
  return (Float)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
  return x * y + z;
#endif
}
MITTENS_INLINE Float fma(Float x, float y, float z) {
  return fma(x, Float{} + y, Float{} + z);
}

// Where one is NaN, the second.
MITTENS_INLINE Float maximum(Float x, Float y) {
#if defined(__AVX512F__)
  return (Float)_mm512_maskz_max_ps(0xffff, (__m512)x, (__m512)y);
#else
  return x > y ? x : y;
#endif
}
MITTENS_INLINE Float minimum(Float x, Float y) {
#if defined(__AVX512F__)
  return (Float)_mm512_maskz_min_ps(0xffff, (__m512)x, (__m512)y);
#else
  return x < y ? x : y;
#endif
}

// The nearest whole number, for |x| < 2^22; infinity may give NaN.
MITTENS_INLINE Float nearest(Float x) {
#if defined(__AVX512F__)
  return (Float)_mm512_maskz_roundscale_ps(0xffff, (__m512)x, 0);
#elif defined(__AVX2__)
  return (Float)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__ARM_NEON)
  return (Float)vrndnq_f32((float32x4_t)x);
#else
  return (x + 0x1.8p23f) - 0x1.8p23f;
#endif
}

// p 2^n for a whole number n of at most 8 bits.
MITTENS_INLINE Float scale(Float p, Float n) {
#if defined(__AVX512F__)
  return (Float)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)n);
#else
  const Int exponent = __builtin_convertvector(n, Int);
  const Int half = exponent >> 1;  // in two steps, since 2^n itself may not be a float32
  return p * (Float)((half + 127) << 23) * (Float)((exponent - half + 127) << 23);
#endif
}

// e^x within 1 ulp, subnormal results included; NaN stays NaN.
MITTENS_INLINE Float exp(Float x) {
  x = minimum(Float{} + 89.0f, maximum(Float{} - 104.0f, x));  // beyond them infinity and 0
  const Float n = nearest(x * 0x1.715476p0f);
  Float r = fma(n, Float{} - 0x1.62e4p-1f, x);  // x - n log(2), log(2) in two parts; |r| <= log(2) / 2
  r = fma(n, Float{} - 0x1.7f7d1cp-20f, r);
  Float p = fma(r, 0x1.6a2434p-10f, 0x1.1239e2p-7f);
  p = fma(p, r, Float{} + 0x1.5558f2p-5f);
  p = fma(p, r, Float{} + 0x1.555492p-3f);
  p = fma(p, r, Float{} + 0x1.fffffcp-2f);
  return scale(fma(p * r, r, r) + 1.0f, n);
}

// 2^x within 3e-6 of it, for x <= 127; NaN stays NaN. Enough for results of 2-byte types.
MITTENS_INLINE Float fast_exp2(Float x) {
  x = maximum(Float{} - 150.0f, x);
  const Float n = nearest(x);
  const Float r = x - n;
  Float p = fma(r, 0x1.3a02ccp-7f, 0x1.c9fc46p-5f);
  p = fma(p, r, Float{} + 0x1.ec0378p-3f);
  p = fma(p, r, Float{} + 0x1.62e12cp-1f);
  return scale(fma(p, r, Float{} + 1.0f), n);
}

MITTENS_INLINE float exp(float x) {
  return exp(Float{} + x)[0];
}

MITTENS_INLINE Floats operator+(Floats x, Floats y) {
  return {x.a + y.a, x.b + y.b};
}
MITTENS_INLINE Floats operator-(Floats x, Floats y) {
  return {x.a - y.a, x.b - y.b};
}
MITTENS_INLINE Floats operator*(Floats x, Floats y) {
  return {x.a * y.a, x.b * y.b};
}
MITTENS_INLINE Floats operator+(Floats x, float y) {
  return {x.a + y, x.b + y};
}
MITTENS_INLINE Floats operator-(Floats x, float y) {
  return {x.a - y, x.b - y};
}
MITTENS_INLINE Floats operator*(Floats x, float y) {
  return {x.a * y, x.b * y};
}
MITTENS_INLINE Floats fma(Floats x, Floats y, Floats z) {
  return {fma(x.a, y.a, z.a), fma(x.b, y.b, z.b)};
}
MITTENS_INLINE Floats maximum(Floats x, Floats y) {
  return {maximum(x.a, y.a), maximum(x.b, y.b)};
}

// exp(x - shift), for x <= shift, as precise as T needs.
template <typename T>
MITTENS_INLINE Floats exp_below(Floats x, float shift) {
  if constexpr (__is_same(T, float)) {
    return {exp(x.a - shift), exp(x.b - shift)};
  } else {
    constexpr float log2_e = 0x1.715476p0f;
    // Not as one fma: shift * log2_e may be infinite where x - shift is not.
    return {fast_exp2((x.a - shift) * log2_e), fast_exp2((x.b - shift) * log2_e)};
  }
}

// One value from all elements, by halves.
template <typename Combine>
MITTENS_INLINE float reduce(Float v, const Combine& combine) {
#if defined(__x86_64__)
#if defined(__AVX512F__)
  __m256 halves[2];
  __builtin_memcpy(halves, &v, sizeof(v));
  const __m256 half = combine(halves[0], halves[1]);
  const __m128 quarter = combine(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif defined(__AVX2__)
  const __m128 quarter = combine(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
#else
  const __m128 quarter = (__m128)v;
#endif
  const __m128 pair = combine(quarter, _mm_movehl_ps(quarter, quarter));
  return combine(pair[0], pair[1]);
#else
  return combine(combine(v[0], v[2]), combine(v[1], v[3]));
#endif
}

MITTENS_INLINE float total(Float v) {
  return reduce(v, [](auto x, auto y) MITTENS_INLINED { return x + y; });
}

// ---- loops ----

// A number that a lambda can use as a template argument.
template <int i>
struct Index {
  static constexpr int value = i;
};

// Calls body(Index<0>()) to body(Index<n - 1>()), unrolled.
template <typename Body, int... i>
MITTENS_INLINE void repeat(std::integer_sequence<int, i...>, const Body& body) {
  (body(Index<i>()), ...);
}
template <int n, typename Body>
MITTENS_INLINE void repeat(const Body& body) {
  repeat(std::make_integer_sequence<int, n>(), body);
}

// Accumulators of a loop: neighbouring units go to different ones, so that they do not wait for each other.
struct Sums {
  Floats v[2] = {};
  Float ended = {};  // of chains before
  MITTENS_INLINE void add(int k, Floats x) {
    v[k] = v[k] + x;
  }
  MITTENS_INLINE void add_product(int k, Floats x, Floats y) {
    v[k] = fma(x, y, v[k]);
  }
  MITTENS_INLINE void end_chains() {
    ended = ended + ((v[0].a + v[0].b) + (v[1].a + v[1].b));
    v[0] = v[1] = Floats();
  }
  MITTENS_INLINE float total() const {
    return reduce(ended + ((v[0].a + v[0].b) + (v[1].a + v[1].b)),
                  [](auto x, auto y) MITTENS_INLINED { return x + y; });
  }
};

struct Maxima {
  Floats v[2] = {{Float{} - infinity, Float{} - infinity}, {Float{} - infinity, Float{} - infinity}};
  MITTENS_INLINE void add(int k, Floats x) {
    v[k] = maximum(x, v[k]);
  }
  MITTENS_INLINE float total() const {
    const Floats all = maximum(v[0], v[1]);
    return reduce(maximum(all.a, all.b), [](auto x, auto y) MITTENS_INLINED { return x > y ? x : y; });
  }
};

// Calls body(index, part) for the vectors of n elements.
template <typename Body>
MITTENS_INLINE void each_vector(size_t n, const Body& body) {
  size_t i = 0;
  for (; i + width <= n; i += width) {
    body(i, All());
  }
  if (i < n) {
    body(i, Some{n - i});
  }
}

// Calls body(index, part, k) for the units of n elements; k names one of two accumulators.
template <typename Body>
MITTENS_INLINE void each_unit(size_t n, const Body& body) {
  size_t i = 0;
  for (; i + 2 * unit <= n; i += 2 * unit) {
    body(i, All(), 0);
    body(i + unit, All(), 1);
  }
  if (i + unit <= n) {
    body(i, All(), 0);
    i += unit;
  }
  if (i < n) {
    body(i, Some{n - i}, 1);
  }
}

// As each_unit, where body adds to each of `sums` once: no lane adds more than 16 numbers in a chain, whose roundings
// may all go the same way.
template <typename Body, typename... S>
MITTENS_INLINE void each_unit_into(size_t n, const Body& body, S&... sums) {
  constexpr size_t part = 16 * 2 * unit;
  size_t begin = 0;
  do {
    const size_t left = n - begin;
    each_unit(left < part ? left : part, [&](size_t i, auto tail, int k) MITTENS_INLINED { body(begin + i, tail, k); });
    (sums.end_chains(), ...);
    begin += part;
  } while (begin < n);
}

}  // namespace mittens::cpu::MITTENS_ISA
