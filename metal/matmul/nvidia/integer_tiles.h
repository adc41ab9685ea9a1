// Packed integers as operands of products of 8x8 matrices: less some zero that keeps them exact in T, and that is a few
// instructions away.
#pragma once

#include "mittens/dequantize.h"
#include "mittens/tile.h"

namespace mittens {

template <typename T, int bits>
constexpr float tile_zero() {
  return is_same_v<T, bfloat> && bits == 4 ? -128.0f : float(1 << (bits - 1));
}

// What makes numbers of the integers in the halves of a word: of an integer i 1024 + i as a half, 128 + i as a bfloat,
// which only has room for 4 bits. two23 is 2^23 as the bits of a float: from the host where registers allow, since a
// constant that the compiler knows takes instructions of its own (extract of dequantize.h).
template <typename T>
constexpr uint integer_offset(uint two23) {
  const uint both = two23 | (two23 >> 16);
  return is_same_v<T, half> ? both + 0x19001900u : both - 0x08000800u;
}

// Two integers in the halves of a word, less their zero.
template <typename T, int bits>
inline vec<T, 2> less_zero(uint pair, uint offset) {
  constexpr float zero = tile_zero<T, bits>();
  if constexpr (is_same_v<T, half>) {
    return as_type<half2>(pair | offset) - half2(half(1024 + zero));
  } else if constexpr (is_same_v<T, bfloat> && bits == 4) {
    return as_type<vec<T, 2>>(pair | offset);
  } else {
    constexpr uint two23 = 0x4b000000u;
    const float lower = as_type<float>((pair & 0xffffu) | two23) - (8388608.0f + zero);
    const float upper = as_type<float>((pair >> 16) | two23) - (8388608.0f + zero);
    return vec<T, 2>(T(lower), T(upper));
  }
}

// Integers t and t + 4 of a word of 4-bit integers.
template <typename T>
inline vec<T, 2> nibble_pair(uint word, int t, uint offset) {
  if constexpr (is_same_v<T, half>) {
    const uint from = t < 2 ? word : word >> 8;
    if (t % 2 == 1) {  // 4 bits up: a multiplication instead of a shift
      constexpr float zero = 64 + tile_zero<half, 4>();
      return as_type<half2>((from & 0x00f000f0u) | offset) * half(1.0f / 16) - half2(half(zero));
    }
    return less_zero<T, 4>(from & 0x000f000fu, offset);
  } else {
    return less_zero<T, 4>((word >> (4 * t)) & 0x000f000fu, offset);
  }
}

}  // namespace mittens
