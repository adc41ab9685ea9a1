// GGUF blocks as the bytes of PackedRows. A product of a scale and an integer is exact, so that no order of these
// products rounds.
#pragma once

#include "cpu/isa/matmul/unpack_integers.h"

namespace mittens::cpu::MITTENS_ISA {

MITTENS_INLINE float half_at(const uint8_t* p) {
  uint16_t bits;
  __builtin_memcpy(&bits, p, 2);
#if defined(__AVX2__)
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits)));
#else
  return widen(Half{} + bits)[0];
#endif
}

constexpr Bytes16 iq4_bytes = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// Half of 2^(e - 127).
MITTENS_INLINE float mxfp4_scale(uint8_t e) {
  const uint32_t bits = e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23;
  return __builtin_bit_cast(float, bits);
}

// Half of an unsigned float of 4 exponent and 3 fraction bits; 0x7f stands for 0.
MITTENS_INLINE float nvfp4_scale(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  const float scale =
      exponent == 0 ? static_cast<float>(fraction) / 1024 : static_cast<float>((8 + fraction) << exponent) / 2048;
  return bits == 0x7f ? 0 : scale;
}

// The lower nibbles of 16 bytes, then the upper ones.
MITTENS_INLINE Bytes32 nibbles_of(const uint8_t* p) {
  const Bytes16 both = read_16(p), low = both & 15, high = both >> 4;
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20,
                                 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31);
}

// 16 where a bit of four bytes is set.
MITTENS_INLINE Bytes32 fifths_of(const uint8_t* p) {
  uint32_t four;
  __builtin_memcpy(&four, p, 4);
  typedef uint32_t Words __attribute__((vector_size(16)));
  const Bytes16 bytes = (Bytes16)(Words{} + four);
  constexpr Bytes16 bit = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  const Bytes16 low = look_up(bytes, Bytes16{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1});
  const Bytes16 high = look_up(bytes, Bytes16{2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3});
  const Bytes16 a = (Bytes16)((low & bit) == bit) & 16, b = (Bytes16)((high & bit) == bit) & 16;
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22,
                                 23, 24, 25, 26, 27, 28, 29, 30, 31);
}

// Values in a table of the 32 nibbles of 16 bytes: the lower nibbles, then the upper ones.
MITTENS_INLINE void look_up_nibbles(const uint8_t* p, Bytes16 table, uint8_t* to) {
  const Bytes16 both = read_16(p);
  write(to, look_up(table, both & 15), All());
  write(to + 16, look_up(table, both >> 4), All());
}

// Scales and minima of the 8 groups of q4_k and q5_k, 6 bits each.
MITTENS_INLINE void scales_of_8(const uint8_t* b, float* scales, float* offsets) {
  const float d = half_at(b), least = half_at(b + 2);
  uint32_t p[3];
  __builtin_memcpy(p, b + 4, 12);
  const uint32_t integers[4] = {p[0] & 0x3f3f3f3f, (p[2] & 0x0f0f0f0f) | (p[0] >> 6 & 0x03030303) << 4,
                                p[1] & 0x3f3f3f3f, (p[2] >> 4 & 0x0f0f0f0f) | (p[1] >> 6 & 0x03030303) << 4};
  uint8_t bytes[16];
  __builtin_memcpy(bytes, integers, 16);
  for (size_t g = 0; g < 8; ++g) {
    scales[g] = d * static_cast<float>(bytes[g]);
    offsets[g] = -(least * static_cast<float>(bytes[8 + g]));
  }
}

// log2 of a group's size.
constexpr int block_group_bits(BlockKind kind) {
  const bool small =
      kind == BlockKind::q2_k || kind == BlockKind::q3_k || kind == BlockKind::q6_k || kind == BlockKind::nvfp4;
  return small ? 4 : 5;
}

template <BlockKind kind>
MITTENS_INLINE void unpack_block(const uint8_t* b, uint8_t* to, float* scales, float* offsets) {
  constexpr size_t groups = block_weights(kind) >> block_group_bits(kind);
  for (size_t g = 0; g < groups; ++g) {
    offsets[g] = -0.0f;
  }
  auto put = [&](size_t at, Bytes32 integers) MITTENS_INLINED { write(to + at, integers + 128, All()); };
  if constexpr (kind == BlockKind::q4_0) {
    scales[0] = half_at(b);
    write(to, nibbles_of(b + 2) + 120, All());
  } else if constexpr (kind == BlockKind::q8_0) {
    scales[0] = half_at(b);
    put(0, read_32(b + 2));
  } else if constexpr (kind == BlockKind::q4_1) {
    scales[0] = half_at(b);
    offsets[0] = half_at(b + 2);
    put(0, nibbles_of(b + 4));
  } else if constexpr (kind == BlockKind::q5_0) {
    scales[0] = half_at(b);
    write(to, (nibbles_of(b + 6) | fifths_of(b + 2)) + 112, All());
  } else if constexpr (kind == BlockKind::q5_1) {
    scales[0] = half_at(b);
    offsets[0] = half_at(b + 2);
    put(0, nibbles_of(b + 8) | fifths_of(b + 4));
  } else if constexpr (kind == BlockKind::iq4_nl) {
    scales[0] = half_at(b);
    look_up_nibbles(b + 2, iq4_bytes, to);
  } else if constexpr (kind == BlockKind::mxfp4) {
    scales[0] = mxfp4_scale(b[0]);
    look_up_nibbles(b + 1, fp4_bytes, to);
  } else if constexpr (kind == BlockKind::nvfp4) {
    for (size_t g = 0; g < 4; ++g) {
      scales[g] = nvfp4_scale(b[g]);
    }
    for (size_t g = 0; g < 4; g += 2) {
      const Bytes16 both = read_16(b + 4 + g * 8), low = look_up(fp4_bytes, both & 15);
      const Bytes16 high = look_up(fp4_bytes, both >> 4);
      write(to + g * 16, __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
            All());
      write(to + g * 16 + 16,
            __builtin_shufflevector(low, high, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31), All());
    }
  } else if constexpr (kind == BlockKind::iq4_xs) {
    const float d = half_at(b);
    uint16_t upper;
    __builtin_memcpy(&upper, b + 2, 2);
    for (size_t g = 0; g < 8; ++g) {
      const int scale = (b[4 + g / 2] >> (g % 2 * 4) & 15) | (upper >> (2 * g) & 3) << 4;
      scales[g] = d * static_cast<float>(scale - 32);
      look_up_nibbles(b + 8 + g * 16, iq4_bytes, to + g * 32);
    }
  } else if constexpr (kind == BlockKind::q2_k) {
    const float d = half_at(b + 80), least = half_at(b + 82);
    for (size_t g = 0; g < 16; ++g) {
      scales[g] = d * static_cast<float>(b[g] & 15);
      offsets[g] = -(least * static_cast<float>(b[g] >> 4));
    }
    repeat<2>([&](auto h) MITTENS_INLINED {
      const Bytes32 q = read_32(b + 16 + h.value * 32);
      repeat<4>([&](auto j) MITTENS_INLINED { put(h.value * 128 + j.value * 32, q >> (2 * j.value) & 3); });
    });
  } else if constexpr (kind == BlockKind::q3_k) {
    const float d = half_at(b + 108);
    for (size_t g = 0; g < 16; ++g) {
      const int low = b[96 + g % 8] >> (g / 8 * 4) & 15, high = b[104 + g % 4] >> (g / 4 * 2) & 3;
      scales[g] = d * static_cast<float>((low | high << 4) - 32);
    }
    const Bytes32 upper = read_32(b);
    repeat<2>([&](auto h) MITTENS_INLINED {
      const Bytes32 q = read_32(b + 32 + h.value * 32);
      repeat<4>([&](auto j) MITTENS_INLINED {
        const Bytes32 third = (upper >> (4 * h.value + j.value) & 1) << 2;
        write(to + h.value * 128 + j.value * 32, ((q >> (2 * j.value) & 3) | third) + 124, All());
      });
    });
  } else if constexpr (kind == BlockKind::q4_k) {
    scales_of_8(b, scales, offsets);
    for (size_t g = 0; g < 4; ++g) {
      const Bytes32 q = read_32(b + 16 + g * 32);
      put(g * 64, q & 15);
      put(g * 64 + 32, q >> 4);
    }
  } else if constexpr (kind == BlockKind::q5_k) {
    scales_of_8(b, scales, offsets);
    const Bytes32 upper = read_32(b + 16);
    repeat<4>([&](auto g) MITTENS_INLINED {
      const Bytes32 q = read_32(b + 48 + g.value * 32);
      put(g.value * 64, (q & 15) | (upper >> (2 * g.value) & 1) << 4);
      put(g.value * 64 + 32, q >> 4 | (upper >> (2 * g.value + 1) & 1) << 4);
    });
  } else {
    static_assert(kind == BlockKind::q6_k);
    const float d = half_at(b + 208);
    for (size_t g = 0; g < 16; ++g) {
      scales[g] = d * static_cast<float>(static_cast<int8_t>(b[192 + g]));
    }
    repeat<2>([&](auto h) MITTENS_INLINED {
      const Bytes32 high = read_32(b + 128 + h.value * 32);
      repeat<4>([&](auto j) MITTENS_INLINED {
        const Bytes32 low = read_32(b + h.value * 64 + j.value % 2 * 32);
        const Bytes32 upper = (high >> (2 * j.value) & 3) << 4;
        const Bytes32 nibbles = j.value < 2 ? low & 15 : low >> 4;
        write(to + h.value * 128 + j.value * 32, (nibbles | upper) + 96, All());
      });
    });
  }
}

template <BlockKind kind>
void unpack_blocks(const PackedRows& from, size_t n, size_t begin, size_t size, uint8_t* to, float* scales,
                   float* offsets) {
  constexpr size_t weights = block_weights(kind);
  constexpr int group_bits = block_group_bits(kind);
  const uint8_t* block = from.rows + n * from.row_stride + begin / weights * block_bytes(kind);
  for (size_t i = 0; i < size; i += weights, block += block_bytes(kind)) {
    unpack_block<kind>(block, to + i, scales + (i >> group_bits), offsets + (i >> group_bits));
  }
}

}  // namespace mittens::cpu::MITTENS_ISA
