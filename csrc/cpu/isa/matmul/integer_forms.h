// Integers that stand for elements of x, several in a word of 32 bits, and how they multiply packed weights. A form has
//   largest                  the greatest integer
//   of_word<Source>          words of weights in a packed word; word k has the columns k, k + of_word, ..
//   parts                    words of x for a word of weights
//   part<p>(integers)        part p of each integer, in the lowest bits
//   bits                     of an integer in a word of x
//   exists<bits>             whether this instruction set multiplies them by weights of some bits
//   weights<k, Source>(raw)  the weights of word k, plus middle<Source>
//   Sum add(Sum, w, x)       the sum, with the products of each lane; x has the parts
//   pairs                    whether panels multiply two words of two rows of x by two words of two outputs, with
//                            add_pairs as add: a sum has the first row's products, then the second row's
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

// Rounds v to an integer of a form, at least -largest. NaN is clamped as well, so that the sums of a row that integers
// cannot stand for do not overflow.
template <typename Form>
MITTENS_INLINE Int integers_of_form(Float v) {
  return round_to_integers(maximum(v, Float{} - Form::largest));
}

// Of a row of x.
struct RowSizes {
  float most;
  float sizes;  // the sum of all
  float columns;
};

// Whether bytes of weights have to be signed: weights of all 8 bits lose their middle then.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr bool signed_bytes = true;
#else
constexpr bool signed_bytes = false;
#endif

template <typename Source>
constexpr float middle_of_bytes = signed_bytes && Source::middle == 128 ? 0 : Source::middle;

template <int k, typename Source, typename Words>
MITTENS_INLINE Words byte_weights(Words raw) {
  const Words w = Source::template integers<k, 4>(raw);
  return signed_bytes && Source::middle == 128 ? w ^ 0x80808080 : w;
}

// Shared by forms of 16 bits.
struct SixteenBits {
  template <int>
  static constexpr bool exists = true;

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

#if defined(__ARM_FEATURE_DOTPROD) || defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define MITTENS_DOT_PRODUCTS
// Of four bytes a lane.
MITTENS_INLINE Int add_dot_products(Int sum, UInt w, UInt x) {
#if defined(__AVX512VNNI__)
  return (Int)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVXVNNI__)
  return (Int)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#else
  return (Int)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x);
#endif
}
#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool byte_pairs = true;
#else
constexpr bool byte_pairs = false;
#endif

struct Int8 {
  static constexpr int bits = 8, parts = 1;
  static constexpr bool pairs = byte_pairs;
  static constexpr float largest = 127;

  template <int>
  static MITTENS_INLINE Int part(Int integers) {
    return integers;
  }
  template <typename Source>
  static constexpr float middle = middle_of_bytes<Source>;

  // Not where an element is not finite, huge or tiny. Rounding the elements of a group in which one is large changes
  // them by less than a 30th of it.
  static bool stands_for(const RowSizes& row) {
    return row.sizes == 0 || (row.sizes < infinity && row.most > 0x1p-80f && row.most < 0x1p96f);
  }
  template <typename Source>
  static constexpr int of_word = Source::vectors * bits / 32;

  template <int k, typename Source, typename Words>
  static MITTENS_INLINE Words weights(Words raw) {
    return byte_weights<k, Source>(raw);
  }

#if defined(MITTENS_DOT_PRODUCTS)
  static constexpr size_t longest = 32;
  template <int>
  static constexpr bool exists = true;
  using Sum = Int;

  static MITTENS_INLINE Sum add(Sum sum, UInt w, const UInt (&x)[parts]) {
    return add_dot_products(sum, w, x[0]);
  }
#if defined(__ARM_FEATURE_MATMUL_INT8)
  static MITTENS_INLINE Sum add_pairs(Sum sum, UInt w, const UInt (&x)[parts]) {
    return (Int)vmmlaq_s32((int32x4_t)sum, (int8x16_t)x[0], (int8x16_t)w);
  }
#endif
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
  static MITTENS_INLINE Sum add(Sum sum, UInt w, const UInt (&x)[parts]) {
    return sum + (Halves)_mm512_maddubs_epi16((__m512i)w, (__m512i)x[0]);
  }
  static MITTENS_INLINE Int widened(Sum sum) {
    return (Int)_mm512_madd_epi16((__m512i)sum, _mm512_set1_epi16(1));
  }
#else
  static MITTENS_INLINE Sum add(Sum sum, UInt w, const UInt (&x)[parts]) {
    return sum + (Halves)_mm256_maddubs_epi16((__m256i)w, (__m256i)x[0]);
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

#if defined(MITTENS_DOT_PRODUCTS)
// Integers of 16 bits as two bytes, each multiplied as in Int8: an instruction has more products of bytes, and weights
// need fewer shifts.
struct TwoBytes : SixteenBits {
  static constexpr int bits = Int8::bits, parts = 2;
  static constexpr bool pairs = byte_pairs;
  static constexpr float largest = 127 * 256 + 127;
  static constexpr size_t longest = 4;

  template <int p>
  static MITTENS_INLINE Int part(Int integers) {
    const Int low = integers << 24 >> 24;
    return p == 0 ? low : (integers - low) >> 8;
  }

  template <typename Source>
  static constexpr float middle = middle_of_bytes<Source>;

  template <int k, typename Source, typename Words>
  static MITTENS_INLINE Words weights(Words raw) {
    return byte_weights<k, Source>(raw);
  }

  struct Sum {
    Int8::Sum low, high;
  };
  static MITTENS_INLINE Sum add(Sum sum, UInt w, const UInt (&x)[parts]) {
    return {Int8::add(sum.low, w, {x[0]}), Int8::add(sum.high, w, {x[1]})};
  }
#if defined(__ARM_FEATURE_MATMUL_INT8)
  static MITTENS_INLINE Sum add_pairs(Sum sum, UInt w, const UInt (&x)[parts]) {
    return {Int8::add_pairs(sum.low, w, {x[0]}), Int8::add_pairs(sum.high, w, {x[1]})};
  }
#endif
  static MITTENS_INLINE Int widened(Sum sum) {
    return Int8::widened(sum.low) + (Int8::widened(sum.high) << 8);
  }
  template <typename Source>
  static constexpr int of_word = Source::vectors * bits / 32;
};
#endif

#if defined(__ARM_FEATURE_DOTPROD)
using Int16 = TwoBytes;
#else
struct Int16 : SixteenBits {
  static constexpr int bits = 16, parts = 1;
  static constexpr bool pairs = false;
  static constexpr float largest = 32767;
  static constexpr size_t longest = 64;  // groups have no more

  template <int>
  static MITTENS_INLINE Int part(Int integers) {
    return integers;
  }
  template <typename Source>
  static constexpr float middle = Source::middle;

  template <int k, typename Source, typename Words>
  static MITTENS_INLINE Words weights(Words raw) {
    return Source::template integers<k, 2>(raw);
  }

#if defined(__ARM_NEON)
  struct Sum {  // of the lower two words of all, and of the upper two: a sum of each half
    Int lower, upper;
  };
  static MITTENS_INLINE Sum add(Sum sum, UInt w, const UInt (&x)[parts]) {
    const int16x8_t a = (int16x8_t)w, b = (int16x8_t)x[0];
    return {(Int)vmlal_s16((int32x4_t)sum.lower, vget_low_s16(a), vget_low_s16(b)),
            (Int)vmlal_high_s16((int32x4_t)sum.upper, a, b)};
  }
  static MITTENS_INLINE Int widened(Sum sum) {
    return (Int)vpaddq_s32((int32x4_t)sum.lower, (int32x4_t)sum.upper);
  }
#else
  using Sum = Int;
  static MITTENS_INLINE Sum add(Sum sum, UInt w, const UInt (&x)[parts]) {
#if defined(__AVX512VNNI__)
    return (Int)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)w, (__m512i)x[0]);
#elif defined(__AVX512F__)
    return sum + (Int)_mm512_madd_epi16((__m512i)w, (__m512i)x[0]);
#elif defined(__AVXVNNI__)
    return (Int)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x[0]);
#elif defined(__AVX2__)
    return sum + (Int)_mm256_madd_epi16((__m256i)w, (__m256i)x[0]);
#elif defined(__x86_64__)
    return sum + (Int)_mm_madd_epi16((__m128i)w, (__m128i)x[0]);
#else
    return sum + ((Int)w << 16 >> 16) * ((Int)x[0] << 16 >> 16) + ((Int)w >> 16) * ((Int)x[0] >> 16);
#endif
  }
  static MITTENS_INLINE Int widened(Sum sum) {
    return sum;
  }
#endif
  template <typename Source>
  static constexpr int of_word = Source::vectors * bits / 32;
};
#endif

// Of few rows, which go along the weights as they are read.
#if defined(MITTENS_DOT_PRODUCTS)
using RowInt16 = TwoBytes;
#else
using RowInt16 = Int16;
#endif

constexpr float least_group = 0x1p-80f;  // of a group's largest number; smaller ones become zeros
constexpr size_t panel_integers = 64;  // outputs of weights that are unpacked at once for many rows

// Outputs of a task of `count` products: a panel, or fewer, in multiples, where panels are too few for all threads.
inline size_t outputs_of_task(size_t panel, size_t multiple, size_t count, size_t outputs) {
  const size_t whole = ceil_divide(outputs, panel), pieces = 2 * threads();
  return count * whole >= pieces
             ? panel
             : smaller(rounded_up(ceil_divide(outputs, ceil_divide(pieces, count)), multiple), panel);
}

}  // namespace mittens::cpu::MITTENS_ISA
