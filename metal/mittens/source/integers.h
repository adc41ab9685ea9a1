// Packed integers as halves, without a conversion: an integer is masked into the mantissa of 1024, two at a time where
// both halves of a word have one at the same place. The base is taken off a whole sum, and not off each integer:
//
//   sum (base + factor * v[i]) * x[i]  -  base * sum x[i]
//
// Integers whose factor differs are summed apart: these are the levels of a source.
#pragma once

#include "mittens/integers.h"

namespace mittens {

// Words on any 4 bytes, as wide as they fit.
template <int count>
inline void load_uints(const device uint* p, thread uint (&words)[count]) {
#pragma unroll
  for (int i = 0; i + 4 <= count && count % 4 == 0; i += 4) {
    const uint4 v = ((const device uint4*)p)[i / 4];
    words[i] = v.x;
    words[i + 1] = v.y;
    words[i + 2] = v.z;
    words[i + 3] = v.w;
  }
#pragma unroll
  for (int i = 0; i + 2 <= count && count % 4 == 2; i += 2) {
    const uint2 v = ((const device uint2*)p)[i / 2];
    words[i] = v.x;
    words[i + 1] = v.y;
  }
#pragma unroll
  for (int i = 0; i < count && count % 2 == 1; ++i) {
    words[i] = p[i];
  }
}

// E integers of 2, 4 or 8 bits, which fill whole words, or half of one.
template <int bits, int E>
struct Integers {
  static constant constexpr int size = E;
  static constant constexpr int levels = bits == 8 ? 1 : 8 / bits;

  struct Words {
    uint at[E * bits < 32 ? 1 : E * bits / 32];
  };

  static constexpr int level(int i) {
    return i % levels;
  }
  static constexpr float factor(int level) {
    return float(1 << (level * bits));
  }
  static constant constexpr float base = 1024.0f;
  // Near the zero of weights that have both signs: sums of v - middle do not grow large only to cancel.
  static constant constexpr float middle = float(1 << (bits - 1));
  static constant constexpr float headroom = 1.0f;

  // From a column on, of the row that begins at word `row`.
  static Words load(const device uint* p, uint row, uint column) {
    Words words;
    if constexpr (E * bits < 32) {
      words.at[0] = ((const device ushort*)p)[row * 2 + column / (16 / bits)];
    } else {
      load_uints(p + (row + column / (32 / bits)), words.at);
    }
    return words;
  }

  // base + factor * the integers.
  static void unpack(Words words, thread half (&q)[E]) {
    constexpr int each = 32 / bits;  // integers of a word
    constexpr uint mask = ((1u << bits) - 1) * 0x00010001u;
#pragma unroll
    for (int p = 0; p < E / each; ++p) {
      const uint upper = words.at[p] >> 8;
#pragma unroll
      for (int i = 0; i < each / 2; ++i) {
        const uint word = i * bits < 8 ? words.at[p] : upper;
        const half2 pair = masked_pair(word, mask << (i * bits % 8));
        q[p * each + i] = pair.x;
        q[p * each + i + each / 2] = pair.y;
      }
    }
  }
};

// 16 integers of 3, 5 or 6 bits, one after another from the lowest bit up: a run begins on 2 bytes.
template <int bits>
struct OddIntegers {
  static constant constexpr int size = 16;
  static constant constexpr int levels = 1;
  static constant constexpr int count = (bits + 1) / 2;  // words of a run

  struct Words {
    uint at[count];
  };

  static constexpr int level(int) {
    return 0;
  }
  static constexpr float factor(int) {
    return 1.0f;
  }
  static constant constexpr float base = 1024.0f;
  static constant constexpr float middle = float(1 << (bits - 1));
  static constant constexpr float headroom = 1.0f;

  // Rows are whole words, so that no word is beyond the row that a run is in.
  static Words load(const device uint* p, uint row, uint column) {
    const uint halves = column / 16 * bits;  // of the row, before the run
    const uint first = row + halves / 2;
    Words words;
    if constexpr (bits % 2 == 0) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        words.at[i] = p[first + i];
      }
    } else {
      uint in_memory[count];
#pragma unroll
      for (int i = 0; i < count; ++i) {
        in_memory[i] = p[first + i];
      }
      const bool shifted = halves % 2 != 0;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const uint next = i + 1 < count ? in_memory[i + 1] << 16 : 0;
        words.at[i] = shifted ? in_memory[i] >> 16 | next : in_memory[i];
      }
    }
    return words;
  }

  static void unpack(Words words, thread half (&q)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int bit = i * bits;
      uint word = words.at[bit / 32] >> (bit % 32);
      if (bit % 32 + bits > 32) {
        word |= words.at[bit / 32 + 1] << (32 - bit % 32);
      }
      q[i] = as_type<half>(ushort((word & ((1u << bits) - 1)) | 0x6400u));
    }
  }
};

template <int bits, int E>
struct IntegersOf {
  using type = Integers<bits, E>;
};
template <int E>
struct IntegersOf<2, E> {
  using type = Integers<2, 16>;
};
template <int E>
struct IntegersOf<3, E> {
  using type = OddIntegers<3>;
};
template <int E>
struct IntegersOf<5, E> {
  using type = OddIntegers<5>;
};
template <int E>
struct IntegersOf<6, E> {
  using type = OddIntegers<6>;
};

}  // namespace mittens
