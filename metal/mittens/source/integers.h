// Unsigned integers of 4 or 8 bits in 32-bit words as halves, two at a time and without a conversion: both halves of a
// word are masked into the mantissa of 1024. The base is taken off a whole sum, and not off each integer:
//
//   sum (base + factor * v[i]) * x[i]  -  base * sum x[i]
//
// Integers whose factor differs are summed apart: these are the levels of a source.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace mittens {

// E integers, in E * bits / 32 words.
template <int bits, int E>
struct Integers {
  static constant constexpr int size = E;
  static constant constexpr int levels = bits == 4 ? 2 : 1;

  struct Words {
    uint at[E * bits / 32];
  };

  static constexpr int level(int i) {
    return bits == 4 ? i % 2 : 0;
  }
  static constexpr float factor(int level) {
    return level == 0 ? 1.0f : 16.0f;
  }
  static constexpr float base() {
    return 1024.0f;
  }
  // Near the zero of weights that have both signs: sums of v - middle do not grow large only to cancel.
  static constexpr float middle() {
    return bits == 4 ? 8.0f : 128.0f;
  }

  static Words load(const device uint* p) {
    Words words;
    if constexpr (E * bits == 128) {
      const uint4 v = *(const device uint4*)p;
      words.at[0] = v.x;
      words.at[1] = v.y;
      words.at[2] = v.z;
      words.at[3] = v.w;
    } else if constexpr (E * bits == 64) {
      const uint2 v = *(const device uint2*)p;
      words.at[0] = v.x;
      words.at[1] = v.y;
    } else {
      words.at[0] = *p;
    }
    return words;
  }

  // base + factor * the integers.
  static void unpack(Words words, thread half (&q)[E]) {
    constexpr int each = 32 / bits;  // integers of a word
    constexpr uint mask = bits == 4 ? 0x000f000fu : 0x00ff00ffu;
#pragma unroll
    for (int p = 0; p < E / each; ++p) {
      const uint upper = words.at[p] >> 8;
#pragma unroll
      for (int i = 0; i < each / 2; ++i) {
        const uint word = i * bits < 8 ? words.at[p] : upper;
        const half2 pair = as_type<half2>((word & (mask << (i * bits % 8))) | 0x64006400u);
        q[p * each + i] = pair.x;
        q[p * each + i + each / 2] = pair.y;
      }
    }
  }
};

}  // namespace mittens
