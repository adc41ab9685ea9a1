// The source of rows in formats that have none of their own: a row is widened to float32 when it is begun, by a
// function of its format.
#pragma once

#include "cpu/isa/matmul/row_products.h"

namespace mittens::cpu::MITTENS_ISA {

// Columns [begin, begin + size) of a row, in whole groups or blocks. scales, biases: of the row, if it has any.
using Unpack = void (*)(const uint8_t* row, const void* scales, const void* biases, size_t begin, size_t size,
                        float* to);

struct Unpacked : Dense<float> {
  Unpack unpack;
  const uint8_t* rows;
  const char* scales;
  const char* biases;
  size_t row_stride;  // bytes, as the next two
  size_t scales_stride;
  size_t biases_stride;
  double row_bytes;  // of a column

  static constexpr bool scaled = false;
  using Element = void;

  size_t memory(size_t size) const {
    return ceil_divide(size, unit) * unit;
  }
  size_t bytes(size_t columns) const {
    return static_cast<size_t>(static_cast<double>(columns) * row_bytes);
  }
  size_t stride_bytes() const {
    return 0;  // what comes next is not in memory yet
  }
  Row row(size_t n, size_t begin, size_t size, float* memory) const {
    unpack(rows + n * row_stride, scales + n * scales_stride, biases + n * biases_stride, begin, size, memory);
    return memory;
  }
};

// gguf.cpp has the products.
extern template void RowProducts<Unpacked>::direct<true>(const float*, size_t, size_t, size_t, float*, size_t, float*,
                                                         bool) const;
extern template void RowProducts<Unpacked>::panel(const float*, size_t, size_t, size_t, float*, size_t, float*) const;

// --- groups of integers, as mx.quantize packs them

// Integers one after another from the lowest bit up, 32 of them in `bits` words. Four neighbours lie within 4 bytes:
// these are copied to four lanes, and each lane shifts its integer down.
template <typename T, int bits, int group>
void unpack_affine(const uint8_t* row, const void* scales, const void* biases, size_t begin, size_t size, float* to) {
  typedef uint32_t Words __attribute__((vector_size(16)));
  typedef int32_t Integers __attribute__((vector_size(16)));
  typedef float Weights __attribute__((vector_size(16)));
  const uint8_t* from = row + begin * bits / 8;
  for (size_t g = begin / group; g < (begin + size) / group; ++g) {
    const Weights scale = Weights{} + widen_one<T>(scales, g), bias = Weights{} + widen_one<T>(biases, g);
    for (size_t i = 0; i < group; i += 32, from += 4 * bits, to += 32) {
      repeat<8>([&](auto v) MITTENS_INLINED {
        constexpr int last = 4 * bits - 4;
        constexpr int byte = v.value * bits / 2 < last ? v.value * bits / 2 : last;
        constexpr uint32_t first = v.value * 4 * bits - byte * 8;
        uint32_t word;
        __builtin_memcpy(&word, from + byte, 4);
        const Words shifted = (Words{} + word) >> Words{first, first + bits, first + 2 * bits, first + 3 * bits};
        const Weights w = __builtin_convertvector((Integers)(shifted & ((1u << bits) - 1)), Weights) * scale + bias;
        __builtin_memcpy(to + v.value * 4, &w, sizeof w);
      });
    }
  }
}

// Floats of 4 or 8 bits, as SmallFloats has them; powers: scales are E8M0 of 32 weights, and not E4M3 of 16.
template <int bits, bool powers>
void unpack_small_floats(const uint8_t* row, const void* scales, const void*, size_t begin, size_t size, float* to) {
  constexpr size_t group = powers ? 32 : 16;
  const uint8_t* from = row + begin * bits / 8;
  const uint8_t* of_groups = static_cast<const uint8_t*>(scales) + begin / group;
  for (size_t i = 0; i < size; i += width) {
    uint8_t codes[width];
    for (size_t j = 0; j < width; ++j) {
      codes[j] = static_cast<uint8_t>(from[(i + j) * bits / 8] >> ((i + j) * bits % 8));
    }
    const UInt values = read_bytes(codes), scale = UInt{} + of_groups[i / group];
    write(to + i, (bits == 4 ? e2m1(values) : e4m3(values)) * (powers ? e8m0(scale) : e4m3(scale)), All());
  }
}

// --- GGUF blocks. A product of a scale and an integer is exact, so that no order of these products rounds.

MITTENS_INLINE float half_at(const uint8_t* p) {
  uint16_t bits;
  __builtin_memcpy(&bits, p, 2);
  return widen(Half{} + bits)[0];
}

// Nibbles of 16 bytes and a fifth bit of each of the 32 integers.
template <bool fifth, typename F>
MITTENS_INLINE void each_of_32(const uint8_t* nibbles, const uint8_t* fifths, const F& f) {
  uint32_t upper = 0;
  if (fifth) {
    __builtin_memcpy(&upper, fifths, 4);
  }
  for (size_t i = 0; i < 16; ++i) {
    f(i, static_cast<int>((nibbles[i] & 15) | (upper >> i & 1) << 4));
    f(i + 16, static_cast<int>(nibbles[i] >> 4 | (upper >> (i + 16) & 1) << 4));
  }
}

// Scales and minima of the 8 groups of q4_k and q5_k, 6 bits each.
struct GroupScales {
  uint8_t scale[8], minimum[8];
  explicit GroupScales(const uint8_t* p) {
    for (size_t i = 0; i < 4; ++i) {
      scale[i] = p[i] & 63;
      minimum[i] = p[i + 4] & 63;
      scale[i + 4] = static_cast<uint8_t>((p[i + 8] & 15) | p[i] >> 6 << 4);
      minimum[i + 4] = static_cast<uint8_t>(p[i + 8] >> 4 | p[i + 4] >> 6 << 4);
    }
  }
};

constexpr float iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// Twice the floats of 4 bits: a sign, 2 bits of exponent and 1 of the fraction.
constexpr float fp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Half of 2^(e - 127).
MITTENS_INLINE float mxfp4_scale(uint8_t e) {
  const uint32_t bits = e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23;
  float scale;
  __builtin_memcpy(&scale, &bits, 4);
  return scale;
}

// Half of an unsigned float of 4 exponent and 3 fraction bits; 0x7f stands for 0.
MITTENS_INLINE float nvfp4_scale(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  const float scale =
      exponent == 0 ? static_cast<float>(fraction) / 1024 : static_cast<float>((8 + fraction) << exponent) / 2048;
  return bits == 0x7f ? 0 : scale;
}

template <BlockKind kind>
MITTENS_INLINE void unpack_block(const uint8_t* b, float* to) {
  if constexpr (kind == BlockKind::q4_1) {
    const float d = half_at(b), m = half_at(b + 2);
    each_of_32<false>(b + 4, b, [&](size_t i, int q) MITTENS_INLINED { to[i] = d * static_cast<float>(q) + m; });
  } else if constexpr (kind == BlockKind::q5_0) {
    const float d = half_at(b);
    each_of_32<true>(b + 6, b + 2, [&](size_t i, int q) MITTENS_INLINED { to[i] = d * static_cast<float>(q - 16); });
  } else if constexpr (kind == BlockKind::q5_1) {
    const float d = half_at(b), m = half_at(b + 2);
    each_of_32<true>(b + 8, b + 4, [&](size_t i, int q) MITTENS_INLINED { to[i] = d * static_cast<float>(q) + m; });
  } else if constexpr (kind == BlockKind::iq4_nl) {
    const float d = half_at(b);
    each_of_32<false>(b + 2, b, [&](size_t i, int q) MITTENS_INLINED { to[i] = d * iq4_values[q]; });
  } else if constexpr (kind == BlockKind::iq4_xs) {
    const float d = half_at(b);
    uint16_t upper;
    __builtin_memcpy(&upper, b + 2, 2);
    for (size_t g = 0; g < 8; ++g) {
      const int scale = (b[4 + g / 2] >> (g % 2 * 4) & 15) | (upper >> (2 * g) & 3) << 4;
      const float dl = d * static_cast<float>(scale - 32);
      each_of_32<false>(b + 8 + g * 16, b,
                        [&](size_t i, int q) MITTENS_INLINED { to[g * 32 + i] = dl * iq4_values[q]; });
    }
  } else if constexpr (kind == BlockKind::q2_k) {
    const float d = half_at(b + 80), least = half_at(b + 82);
    for (size_t g = 0; g < 16; ++g) {
      const float dl = d * static_cast<float>(b[g] & 15), ml = least * static_cast<float>(b[g] >> 4);
      const uint8_t* q = b + 16 + g / 8 * 32 + g % 2 * 16;
      for (size_t i = 0; i < 16; ++i) {
        to[g * 16 + i] = dl * static_cast<float>(q[i] >> (g % 8 / 2 * 2) & 3) - ml;
      }
    }
  } else if constexpr (kind == BlockKind::q3_k) {
    const float d = half_at(b + 108);
    for (size_t g = 0; g < 16; ++g) {
      const int low = b[96 + g % 8] >> (g / 8 * 4) & 15, high = b[104 + g % 4] >> (g / 4 * 2) & 3;
      const float dl = d * static_cast<float>((low | high << 4) - 32);
      const uint8_t* q = b + 32 + g / 8 * 32 + g % 2 * 16;
      const uint8_t* upper = b + g % 2 * 16;
      for (size_t i = 0; i < 16; ++i) {
        const int two = q[i] >> (g % 8 / 2 * 2) & 3;
        to[g * 16 + i] = dl * static_cast<float>((upper[i] >> (g / 2) & 1) ? two : two - 4);
      }
    }
  } else if constexpr (kind == BlockKind::q4_k || kind == BlockKind::q5_k) {
    constexpr bool fifth = kind == BlockKind::q5_k;
    const float d = half_at(b), least = half_at(b + 2);
    const GroupScales scales(b + 4);
    for (size_t g = 0; g < 8; ++g) {
      const float dl = d * static_cast<float>(scales.scale[g]), ml = least * static_cast<float>(scales.minimum[g]);
      const uint8_t* q = b + (fifth ? 48 : 16) + g / 2 * 32;
      for (size_t i = 0; i < 32; ++i) {
        const int upper = fifth ? (b[16 + i] >> g & 1) << 4 : 0;
        to[g * 32 + i] = dl * static_cast<float>((q[i] >> (g % 2 * 4) & 15) | upper) - ml;
      }
    }
  } else if constexpr (kind == BlockKind::mxfp4) {
    const float d = mxfp4_scale(b[0]);
    each_of_32<false>(b + 1, b, [&](size_t i, int q) MITTENS_INLINED { to[i] = d * fp4_values[q]; });
  } else if constexpr (kind == BlockKind::nvfp4) {
    for (size_t g = 0; g < 4; ++g) {
      const float d = nvfp4_scale(b[g]);
      for (size_t i = 0; i < 8; ++i) {
        to[g * 16 + i] = d * fp4_values[b[4 + g * 8 + i] & 15];
        to[g * 16 + i + 8] = d * fp4_values[b[4 + g * 8 + i] >> 4];
      }
    }
  } else {
    static_assert(kind == BlockKind::q6_k);
    const float d = half_at(b + 208);
    for (size_t g = 0; g < 16; ++g) {
      const float dl = d * static_cast<float>(static_cast<int8_t>(b[192 + g]));
      const size_t part = g % 8 / 2, at = g % 2 * 16;  // of 128 weights: 32 at a time
      const uint8_t* low = b + g / 8 * 64 + part % 2 * 32 + at;
      const uint8_t* high = b + 128 + g / 8 * 32 + at;
      for (size_t i = 0; i < 16; ++i) {
        const int q = (low[i] >> (part / 2 * 4) & 15) | (high[i] >> (part * 2) & 3) << 4;
        to[g * 16 + i] = dl * static_cast<float>(q - 32);
      }
    }
  }
}

template <BlockKind kind>
void unpack_blocks(const uint8_t* row, const void*, const void*, size_t begin, size_t size, float* to) {
  constexpr size_t weights = block_weights(kind);
  const uint8_t* block = row + begin / weights * block_bytes(kind);
  for (size_t i = 0; i < size; i += weights, block += block_bytes(kind)) {
    unpack_block<kind>(block, to + i);
  }
}

}  // namespace mittens::cpu::MITTENS_ISA
