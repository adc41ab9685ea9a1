// Single vectors of each element type, and moves across lanes: transposition and sums.
#pragma once

#include <utility>

#include "cpu/isa/simd.h"

namespace mittens::cpu::MITTENS_ISA {

using Lanes = std::make_index_sequence<width>;

// body(0) to body(n - 1), unrolled, so that arrays they index stay in registers.
template <size_t n, typename Body>
MITTENS_INLINE void unrolled(const Body& body) {
  [&]<size_t... i>(std::index_sequence<i...>) MITTENS_INLINED { (body(i), ...); }(std::make_index_sequence<n>());
}

// Calls body(i, n) for pieces of n and for the rest in halves of it, n as a constant.
template <size_t n, typename Body>
MITTENS_INLINE void in_pieces(size_t begin, size_t end, const Body& body) {
  size_t i = begin;
  for (; i + n <= end; i += n) {
    body(i, std::integral_constant<size_t, n>());
  }
  if constexpr (n > 1) {
    in_pieces<n / 2>(i, end, body);
  }
}

// x in all lanes. Float{} + x would be an addition, since it turns -0 into 0.
MITTENS_INLINE Float spread(float x) {
  return x - Float{};
}

template <typename T, typename Part = All>
MITTENS_INLINE Float load_one(const T* p, Part part = {}) {
  if constexpr (__is_same(T, float)) {
    return read<Float>(p, part);
  } else if constexpr (__is_same(T, float16)) {
    return widen(read<Half>(p, part));
  } else {
    return (Float)(__builtin_convertvector(read<Half>(p, part), UInt) << 16);
  }
}

typedef uint8_t Bytes __attribute__((vector_size(width)));

MITTENS_INLINE Int widen_bytes(Bytes v) {
#if defined(__AVX512F__)
  return (Int)_mm512_maskz_cvtepu8_epi32(0xffff, (__m128i)v);
#elif defined(__AVX2__)
  return (Int)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)v));
#else
  return __builtin_convertvector(v, Int);
#endif
}

template <size_t... I>
MITTENS_INLINE Bytes doubled(Bytes v, std::index_sequence<I...>) {
  return __builtin_shufflevector(v, v, (I / 2)...);
}
template <size_t... I>
MITTENS_INLINE Int shifts_of_pairs(std::index_sequence<I...>) {
  return Int{static_cast<int32_t>(I % 2 * 4)...};
}

// The 4-bit integers of width / 2 bytes, the lower half of each byte first.
MITTENS_INLINE Int widen_nibbles(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadl_epi64((const __m128i*)p);
  const Int twice = (Int)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_unpacklo_epi8(bytes, bytes));
#elif defined(__AVX2__)
  int32_t four;
  __builtin_memcpy(&four, p, sizeof(four));
  const __m128i bytes = _mm_cvtsi32_si128(four);
  const Int twice = (Int)_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes));
#else
  Bytes bytes = {};
  __builtin_memcpy(&bytes, p, width / 2);
  const Int twice = widen_bytes(doubled(bytes, Lanes()));
#endif
  return twice >> shifts_of_pairs(Lanes()) & 15;
}

template <typename T>
MITTENS_INLINE Half narrow_one(Float v) {
  if constexpr (__is_same(T, float16)) {
    return narrow(v);
  } else {
    return __builtin_convertvector(round_above<16>(v) >> 16, Half);
  }
}

template <typename T>
MITTENS_INLINE void store_one(T* p, Float v, size_t n) {
  if constexpr (__is_same(T, float)) {
    n < width ? write(p, v, Some{n}) : write(p, v, All());
  } else {
    const Half raw = narrow_one<T>(v);
    __builtin_memcpy(p, &raw, (n < width ? n : width) * sizeof(T));
  }
}

// e^x for x <= 0, as precise as results of type T need.
template <typename T>
MITTENS_INLINE Float exp_one(Float x) {
  return __is_same(T, float) ? exp(x) : fast_exp2(x * 0x1.715476p0f);
}

template <size_t... I>
MITTENS_INLINE Float zip_low(Float a, Float b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (I % 2 == 0 ? I / 2 : width + I / 2)...);
}
template <size_t... I>
MITTENS_INLINE Float zip_high(Float a, Float b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, (I % 2 == 0 ? width / 2 + I / 2 : width + width / 2 + I / 2)...);
}

// Lane j of vector i becomes lane i of vector j.
MITTENS_INLINE void transpose(Float (&v)[width]) {
#pragma GCC unroll 4
  for (size_t step = 1; step < width; step *= 2) {
    Float zipped[width];
    unrolled<width / 2>([&](size_t i) MITTENS_INLINED {
      zipped[2 * i] = zip_low(v[i], v[i + width / 2], Lanes());
      zipped[2 * i + 1] = zip_high(v[i], v[i + width / 2], Lanes());
    });
    unrolled<width>([&](size_t i) MITTENS_INLINED { v[i] = zipped[i]; });
  }
}

// Lane i: the sum of the lanes of vector i.
MITTENS_INLINE Float sum_each(Float (&v)[width]) {
#pragma GCC unroll 4
  for (size_t half = width / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (size_t i = 0; i < half; ++i) {
      v[i] = zip_low(v[i], v[i + half], Lanes()) + zip_high(v[i], v[i + half], Lanes());
    }
  }
  return v[0];
}

MITTENS_INLINE float sum_of(Float v) {
  return reduce(v, [](auto x, auto y) MITTENS_INLINED { return x + y; });
}

MITTENS_INLINE float maximum_of(Float v) {
  return reduce(v, [](auto x, auto y) MITTENS_INLINED { return x > y ? x : y; });
}

}  // namespace mittens::cpu::MITTENS_ISA
