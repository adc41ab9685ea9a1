// Integers that stand for elements of x, several in a word of 32 bits, and how they multiply packed weights. A form has
//   largest                  the greatest integer
//   of_word<Source>          words of x for a word of weights; word k has the columns k, k + of_word, ..
//   exists<bits>             whether this instruction set multiplies them by weights of some bits
//   weights<k, Source>(raw)  the weights that meet word k of x
//   Sum add(Sum, w, x)       the sum, with the products of each lane
//   longest                  additions until a sum is widened
//   Int widened(sum)         in int32
//   stands_for(row)          whether the integers may stand for a row of x
#pragma once

#include "cpu/isa/matmul/weights.h"

namespace mittens::cpu::MITTENS_ISA {

// v, of at most 2^22, rounded to the nearest.
MITTENS_INLINE Int round_to_integers(Float v) {
#if defined(__AVX512F__)
  return (Int)_mm512_maskz_cvtps_epi32(0xffff, (__m512)v);
#elif defined(__AVX2__)
  return (Int)_mm256_cvtps_epi32((__m256)v);
#elif defined(__x86_64__)
  return (Int)_mm_cvtps_epi32((__m128)v);
#else
  return __builtin_convertvector((v + 0x1.8p23f) - 0x1.8p23f, Int);
#endif
}

// Of a row of x.
struct RowSizes {
  float most;
  float sizes;  // the sum of all
  float columns;
};

struct Int16 {
  static constexpr int bits = 16;
  static constexpr float largest = 32767;
  static constexpr size_t longest = 64;  // groups have no more
  template <typename Source>
  static constexpr int of_word = Source::vectors / 2;
  template <int>
  static constexpr bool exists = true;
  using Sum = Int;

  template <int k, typename Source, typename Words>
  static MITTENS_INLINE Words weights(Words raw) {
    return Source::template integers<k, 2>(raw);
  }

  static MITTENS_INLINE Sum add(Sum sum, UInt w, UInt x) {
#if defined(__AVX512VNNI__)
    return (Int)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVX512F__)
    return sum + (Int)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif defined(__AVX2__)
    return sum + (Int)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__x86_64__)
    return sum + (Int)_mm_madd_epi16((__m128i)w, (__m128i)x);
#else
    return sum + ((Int)w << 16 >> 16) * ((Int)x << 16 >> 16) + ((Int)w >> 16) * ((Int)x >> 16);
#endif
  }
  static MITTENS_INLINE Int widened(Sum sum) {
    return sum;
  }

  // Not where an element is not finite, huge or tiny, or so much larger than the mean that rounding its neighbours
  // would show where its own weight is 0.
  static bool stands_for(const RowSizes& row) {
    if (row.sizes == 0) {
      return true;
    }
    const float by_mean = row.most * row.columns / row.sizes;
    return by_mean * by_mean <= 4 * row.columns && row.most > 0x1p-80f && row.most < 0x1p96f;
  }
};

struct Int8 {
  static constexpr int bits = 8;
  static constexpr float largest = 127;

  // Not where an element is not finite, huge or tiny. Rounding the elements of a group in which one is large changes
  // them by less than a 30th of it.
  static bool stands_for(const RowSizes& row) {
    return row.sizes == 0 || (row.sizes < infinity && row.most > 0x1p-80f && row.most < 0x1p96f);
  }
  template <typename Source>
  static constexpr int of_word = Source::vectors / 4;

  template <int k, typename Source, typename Words>
  static MITTENS_INLINE Words weights(Words raw) {
    return Source::template integers<k, 4>(raw);
  }

#if defined(__AVX512VNNI__)
  static constexpr size_t longest = 32;
  template <int>
  static constexpr bool exists = true;
  using Sum = Int;

  static MITTENS_INLINE Sum add(Sum sum, UInt w, UInt x) {
    return (Int)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
  }
  static MITTENS_INLINE Int widened(Sum sum) {
    return sum;
  }
#elif defined(__AVX2__)
  // Sums in int16: 8 times two products of 15 and 127 fit.
  static constexpr size_t longest = 8;
  template <int weight_bits>
  static constexpr bool exists = weight_bits <= 4;
  using Sum = Halves;

#if defined(__AVX512F__)
  static MITTENS_INLINE Sum add(Sum sum, UInt w, UInt x) {
    return sum + (Halves)_mm512_maddubs_epi16((__m512i)w, (__m512i)x);
  }
  static MITTENS_INLINE Int widened(Sum sum) {
    return (Int)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
  }
#else
  static MITTENS_INLINE Sum add(Sum sum, UInt w, UInt x) {
    return sum + (Halves)_mm256_maddubs_epi16((__m256i)w, (__m256i)x);
  }
  static MITTENS_INLINE Int widened(Sum sum) {
    return (Int)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1));
  }
#endif
#else
  template <int>
  static constexpr bool exists = false;
#endif
};

}  // namespace mittens::cpu::MITTENS_ISA
