// Rows of floats of 4 or 8 bits with a scale for each group of columns: mxfp4, mxfp8 and nvfp4, as mx.quantize packs them.
#pragma once

#include "mittens/source/integers.h"

namespace mittens {

// E floats: of 4 bits a sign, 2 bits of exponent and 1 of the fraction, of 8 bits 4 and 3. As the bits of a half they are
// too small by a power of two, the factor.
template <int bits, int E>
struct SmallFloats {
  static constant constexpr int size = E;
  static constant constexpr int levels = 1;

  struct Words {
    uint at[E * bits / 32];
  };

  static constexpr int level(int) {
    return 0;
  }
  static constexpr float factor(int) {
    return bits == 4 ? 1.0f / 16384 : 1.0f / 256;
  }
  static constant constexpr float base = 0.0f;
  static constant constexpr float middle = 0.0f;
  static constant constexpr float headroom = 1.0f;

  static Words load(const device uint* p, uint row, uint column) {
    Words words;
    load_uints(p + (row + column / (32 / bits)), words.at);
    return words;
  }

  // Both halves of a word have one at the same place: its bits but the sign to those from bit 9 or 7 on, the sign to the
  // highest. Of 8 bits the largest is no number; a run that has one is none in its first place.
  static void unpack(Words words, thread half (&q)[E]) {
    constexpr int each = 32 / bits;
    constexpr int fraction = bits == 4 ? 9 : 7;
    constexpr uint size_mask = (bits == 4 ? 0x7u : 0x7fu) << fraction;
    uint carries = 0;
#pragma unroll
    for (int p = 0; p < E / each; ++p) {
#pragma unroll
      for (int i = 0; i < each / 2; ++i) {
        const int up = fraction - i * bits;
        const uint placed = up >= 0 ? words.at[p] << (up >= 0 ? up : 0) : words.at[p] >> (up < 0 ? -up : 0);
        const uint sign = words.at[p] << (16 - bits - i * bits);
        const half2 pair = as_type<half2>((placed & (size_mask * 0x00010001u)) | (sign & 0x80008000u));
        q[p * each + i] = pair.x;
        q[p * each + i + each / 2] = pair.y;
      }
      carries |= (words.at[p] & 0x7f7f7f7fu) + 0x01010101u;
    }
    if (bits == 8 && (carries & 0x80808080u) != 0) {
      q[0] = as_type<half>(ushort(0x7e00));
    }
  }
};

// Scales that are powers of two: an exponent in a byte; the largest is NaN.
inline float power_of_two(uchar bits) {
  return as_type<float>(bits == 255 ? 0x7fc00000u : uint(bits) << 23);
}

// Scales with 4 bits of exponent and 3 of the fraction; the largest is NaN.
inline float small_scale(uchar bits) {
  const uint size = (bits & 0x7f) == 0x7f ? 0x7e00u : (bits & 0x7fu) << 7;
  return float(as_type<half>(ushort(size | (bits & 0x80u) << 8))) * 256.0f;
}

// A matrix from some row on. group_shift: a scale is for 1 << group_shift columns, 32, or 16 with scales of small_scale.
template <int bits, int group_shift, int E>
struct FloatRows {
  using Values = SmallFloats<bits, E>;
  static constant constexpr bool has_bias = false;
  static constant constexpr bool fits_half = false;
  struct Run {
    typename Values::Words words;
    uchar scale;
  };
  const device uint* words;
  const device uchar* scales;
  uint words_stride;  // from row to row
  uint scales_stride;

  Run load(uint row, uint more, uint column) const {
    Run run;
    run.words = Values::load(words, row * words_stride + more * words_stride, column);
    run.scale = scales[row * scales_stride + more * scales_stride + (column >> group_shift)];
    return run;
  }

  static float scale(Run run) {
    return group_shift == 4 ? small_scale(run.scale) : power_of_two(run.scale);
  }
  static float bias(Run) {
    return 0.0f;
  }

  FloatRows at(uint row, bool alone) const {
    FloatRows result = *this;
    result.words += size_t(row) * words_stride;
    result.scales += size_t(row) * scales_stride;
    result.words_stride = alone ? 0 : words_stride;
    result.scales_stride = alone ? 0 : scales_stride;
    return result;
  }
};

}  // namespace mittens
