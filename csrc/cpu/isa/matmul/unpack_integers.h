// Integers as mx.quantize packs them, and floats of few bits, as the bytes of PackedRows.
#pragma once

#include "cpu/isa/row_op.h"
#include "cpu/matmul/packed_rows.h"

namespace mittens::cpu::MITTENS_ISA {

typedef uint8_t Bytes16 __attribute__((vector_size(16)));
typedef uint8_t Bytes32 __attribute__((vector_size(32)));

// table[index] for indices below 16.
MITTENS_INLINE Bytes16 look_up(Bytes16 table, Bytes16 index) {
#if defined(__SSSE3__)
  return (Bytes16)_mm_shuffle_epi8((__m128i)table, (__m128i)index);
#elif defined(__ARM_NEON)
  return (Bytes16)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
#else
  Bytes16 found;
  for (size_t i = 0; i < 16; ++i) {
    found[i] = table[index[i]];
  }
  return found;
#endif
}

MITTENS_INLINE Bytes16 read_16(const uint8_t* p) {
  return read<Bytes16>(p, All());
}

MITTENS_INLINE Bytes32 read_32(const uint8_t* p) {
  return read<Bytes32>(p, All());
}

// Vectors of lanes of 16 bytes, which instructions look up and narrow by themselves.
#if defined(__AVX2__)
constexpr size_t byte_lanes = 2;
typedef Bytes32 LaneBytes;
#else
constexpr size_t byte_lanes = 1;
typedef Bytes16 LaneBytes;
#endif
typedef uint16_t LaneHalves __attribute__((vector_size(16 * byte_lanes)));

// 16 bytes at p, and with two lanes 16 at p + next.
MITTENS_INLINE LaneBytes read_lanes(const uint8_t* p, [[maybe_unused]] size_t next) {
#if defined(__AVX2__)
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + next));
  return (LaneBytes)_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
#else
  return read_16(p);
#endif
}

MITTENS_INLINE LaneBytes look_up_lanes(LaneBytes table, LaneBytes index) {
#if defined(__AVX2__)
  return (LaneBytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#else
  return look_up(table, index);
#endif
}

// The lower bytes of a, then of b, in each lane; the upper ones are zero.
MITTENS_INLINE LaneBytes lower_bytes(LaneHalves a, LaneHalves b) {
#if defined(__AVX2__)
  return (LaneBytes)_mm256_packus_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return (LaneBytes)_mm_packus_epi16((__m128i)a, (__m128i)b);
#else
  return __builtin_shufflevector((LaneBytes)a, (LaneBytes)b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#endif
}

// How 8 integers of some bits come out of the bytes of a lane from an integer on: each lies within two bytes, which a
// product shifts up and a shift then takes down.
template <int bits, size_t first>
struct Placed {
  LaneBytes from;
  LaneHalves up;
  constexpr Placed() : from(), up() {
    for (size_t i = 0; i < 8 * byte_lanes; ++i) {
      const size_t bit = (first + i % 8) * bits;
      from[2 * i] = static_cast<uint8_t>(bit / 8);
      from[2 * i + 1] = static_cast<uint8_t>(bit / 8 + 1);
      up[i] = static_cast<uint16_t>(1u << (16 - bits - bit % 8));
    }
  }
};

// Integers one after another from the lowest bit up, plus 128; size is a multiple of 32.
template <int bits>
MITTENS_INLINE void unpack_bits(const uint8_t* from, size_t size, uint8_t* to) {
  const Placed<bits, 0> low;
  const Placed<bits, 8> high;
  auto unpack = [&](const uint8_t* p, uint8_t* q) MITTENS_INLINED {
    const LaneBytes packed = read_lanes(p, 2 * bits);
    const LaneHalves a = (LaneHalves)look_up_lanes(packed, low.from) * low.up >> (16 - bits);
    const LaneHalves b = (LaneHalves)look_up_lanes(packed, high.from) * high.up >> (16 - bits);
    write(q, lower_bytes(a, b) + 128, All());
  };
  constexpr size_t step = 16 * byte_lanes, step_bytes = step * bits / 8;
  constexpr size_t read_bytes = (byte_lanes - 1) * 2 * bits + 16;
  const size_t bytes = size * bits / 8;
  size_t at = 0;
  for (; at + read_bytes <= bytes; at += step_bytes, to += step) {
    unpack(from + at, to);
  }
  uint8_t end[2 * read_bytes] = {};
  __builtin_memcpy(end, from + at, bytes - at);
  for (size_t i = 0; at + i < bytes; i += step_bytes, to += step) {
    unpack(end + i, to);
  }
}

// Nibbles, the lower of each byte first, as their values in a table; size is a multiple of 16.
MITTENS_INLINE void unpack_nibbles(const uint8_t* from, size_t size, Bytes16 table, uint8_t* to) {
  size_t i = 0;
  for (; i + 32 <= size; i += 32) {
    const Bytes16 both = read_16(from + i / 2);
    const Bytes16 low = look_up(table, both & 15), high = look_up(table, both >> 4);
    write(to + i, __builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), All());
    write(to + i + 16, __builtin_shufflevector(low, high, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31),
          All());
  }
  for (; i < size; i += 2) {
    to[i] = table[from[i / 2] & 15];
    to[i + 1] = table[from[i / 2] >> 4];
  }
}

// Twice the floats of 4 bits (a sign, 2 bits of exponent and 1 of the fraction), plus 128.
constexpr Bytes16 fp4_bytes = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

}  // namespace mittens::cpu::MITTENS_ISA
