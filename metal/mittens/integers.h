// Packed integers of 4 and 8 bits as numbers, without a conversion: an integer is masked into the mantissa of a power of
// two, which then reads as that power + integer * 2^(its lowest bit). Taking the power off is exact.
//
//   of 1024, as halves   integers that stand at the same place of both halves of a word, two at a time
//   of 128, as bfloats   the same: 4 bits are all that there is room for
//   of 2^23, as floats   one at a time
//
// Whole words as floats, and pairs as operands of products of matrices, are less some zero near the middle of the
// integers: it stands for the zero of weights that have both signs, so that sums do not grow large only to cancel. Powers
// of two may come from the host, by two23, which is 2^23 as the bits of a float: a constant that the compiler knows would
// cost a second instruction on GPUs that mask and merge in one, since that takes only one constant.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace mittens {

constant constexpr uint kTwo10 = 0x64006400u;  // 1024 in both halves

// The integers whose lowest bit of both halves is the mask's, as 1024 + integer * 2^(that bit).
inline half2 masked_pair(uint word, uint mask, uint two10 = kTwo10) {
  return as_type<half2>((word & mask) | two10);
}

// Integer k of each half of a word, as masked_pair has it: 4 bits up where it is an odd one of 4 bits, instead of a shift.
template <int bits>
inline half2 placed_pair(uint word, int k, uint two10 = kTwo10) {
  const int bit = bits == 4 && k % 2 == 1 ? 4 : 0;
  return masked_pair(word >> (k * bits - bit), (bits == 8 ? 0x00ff00ffu : 0x000f000fu) << bit, two10);
}

// Integer k of each half of a word.
template <int bits>
inline half2 half_pair(uint word, int k) {
  const half2 both = placed_pair<bits>(word, k);
  return bits == 4 && k % 2 == 1 ? both * half2(0.0625) - half2(64) : both - half2(1024);
}

// Integer i of a word, one by one.
template <int bits>
inline half half_integer(uint word, int i) {
  constexpr int apart = 16 / bits;
  const int k = i % apart;
  const half2 both = placed_pair<bits>(word, k);
  const half one = i < apart ? both.x : both.y;
  return bits == 4 && k % 2 == 1 ? fma(one, half(0.0625), half(-64)) : one - half(1024);
}

template <int bits>
inline float float_integer(uint word, int i) {
  const uint placed = (word >> (i * bits)) & ((1u << bits) - 1);
  return as_type<float>(placed | 0x4b000000u) - 8388608.0f;
}

// --- operands of products of matrices

// The zero that integers of pairs are less of.
template <typename T, int bits>
constexpr float tile_zero() {
  return is_same_v<T, bfloat> && bits == 4 ? -128.0f : float(1 << (bits - 1));
}

// The power of two whose bits make numbers of the integers in the halves of a word: 1024 of halves, 128 of bfloats.
template <typename T>
constexpr uint integer_offset(uint two23) {
  const uint both = two23 | (two23 >> 16);
  return is_same_v<T, half> ? both + 0x19001900u : both - 0x08000800u;
}

// Integer k of both halves of a word, less their zero.
template <typename T, int bits>
inline vec<T, 2> integer_pair(uint word, int k, uint offset) {
  constexpr float zero = tile_zero<T, bits>();
  if constexpr (is_same_v<T, half>) {
    if (bits == 4 && k % 2 == 1) {
      return placed_pair<bits>(word, k, offset) * half(1.0f / 16) - half2(half(64 + zero));
    }
    return placed_pair<bits>(word, k, offset) - half2(half(1024 + zero));
  } else {
    const uint pair = (word >> (k * bits)) & (bits == 8 ? 0x00ff00ffu : 0x000f000fu);
    if constexpr (bits == 4) {
      return as_type<vec<T, 2>>(pair | offset);
    } else {
      constexpr uint two23 = 0x4b000000u;
      const float lower = as_type<float>((pair & 0xffffu) | two23) - (8388608.0f + zero);
      const float upper = as_type<float>((pair >> 16) | two23) - (8388608.0f + zero);
      return vec<T, 2>(T(lower), T(upper));
    }
  }
}

// --- whole words as floats

// The middle of the integers, which all are taken from.
template <int bits>
constexpr int zero_of() {
  return 1 << (bits - 1);
}

// The bit at which integer i stands when it is taken out: the upper ones of 4 bits after a shift by 9, so that the
// highest ends below bit 23. One shift serves a word, as it costs more than an addition on every GPU.
template <int bits>
constexpr int bit_of(int i) {
  return bits == 8 ? 8 * (i % 2) : i < 5 ? 4 * i : 4 * i - 9;
}

// 2^23 + integer * 2^bit for the middle integer.
template <int bits>
constexpr float middle_of(int i) {
  return float((1 << 23) + (zero_of<bits>() << bit_of<bits>(i)));
}

// By how much unpack_word leaves integer i too large: by nothing, if exact. Where an integer stands high its middle may
// be taken off a whole sum.
template <int bits, bool exact>
constexpr float remainder_of(int i) {
  return !exact && bit_of<bits>(i) >= 15 ? middle_of<bits>(i) : 0.0f;
}

// The factor that makes an activation fit integer i of a word.
template <int bits>
constexpr float activation_scale(int i) {
  return 1.0f / float(1 << bit_of<bits>(i));
}

template <int bits, bool exact>
inline float extract(uint word, uint two23, int i) {
  const uint mask = ((1u << bits) - 1) << bit_of<bits>(i);
  const float placed = as_type<float>((word & mask) | two23);
  return remainder_of<bits, exact>(i) != 0.0f ? placed : placed - middle_of<bits>(i);
}

// Integer i of a word less the middle one, as integer * 2^bit_of(i) + remainder_of(i).
template <int bits, bool exact>
inline void unpack_word(uint word, uint two23, thread float (&q)[32 / bits]) {
  const uint upper = word >> (bits == 8 ? 16 : 9);
  if constexpr (bits == 8) {
    q[0] = extract<8, exact>(word, two23, 0);
    q[1] = extract<8, exact>(word, two23, 1);
    q[2] = extract<8, exact>(upper, two23, 2);
    q[3] = extract<8, exact>(upper, two23, 3);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      q[i] = extract<4, exact>(i < 5 ? word : upper, two23, i);
    }
  }
}

}  // namespace mittens
