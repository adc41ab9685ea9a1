// The kinds of GGUF blocks, and how the runs of each are unpacked (mittens/source/gguf.h has their layouts).
#pragma once

#include "mittens/source/integers.h"

namespace mittens {

// In the order of cpu::BlockKind (csrc/cpu/matmul/gguf.h).
enum BlockKind { q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, block_mxfp4, block_nvfp4 };

#define each_block_kind(of)                                                                                        \
  of(q4_0) of(q4_1) of(q5_0) of(q5_1) of(q8_0) of(q2_k) of(q3_k) of(q4_k) of(q5_k) of(q6_k) of(iq4_nl) of(iq4_xs) \
      of(block_mxfp4) of(block_nvfp4)

// Words on any 2 bytes.
template <int count>
inline void load_words(const device uchar* p, thread uint (&words)[count]) {
  const device ushort* halves = (const device ushort*)p;
#pragma unroll
  for (int i = 0; i < count; ++i) {
    words[i] = as_type<uint>(ushort2(halves[2 * i], halves[2 * i + 1]));
  }
}

inline half load_half(const device uchar* p) {
  return *(const device half*)p;
}

// Bits 0 .. 3 at bit `to` of the four bytes of a word.
template <int to>
inline uint spread(uint bits) {
  return (bits & 15) * (0x00204081u << to) & (0x01010101u << to);
}

// E columns of a block of weights, as they lie in memory.
//   load(block, at)   from column `at` on, a multiple of E
//   integers(p)       v of columns 4 * p .. 4 * p + 3, one in each byte
//   scale(), bias()   w = scale() * (v - zero); with a bias scale() * v + bias(), and zero is about in the middle
template <BlockKind kind, int E>
struct Block;

template <int size, int columns, int middle, bool biased>
struct BlockShape {
  static constant constexpr int bytes = size;
  static constant constexpr int weights = columns;
  static constant constexpr int zero = middle;
  static constant constexpr bool has_bias = biased;
};

// --- 32 weights: q4_0, q4_1, q5_0, q5_1

template <int E, int bits, bool biased>
struct SmallBlock {
  using Shape = BlockShape<(biased ? 20 : 18) + (bits == 5 ? 4 : 0), 32, 1 << (bits - 1), biased>;
  static constant constexpr int first = biased ? 4 : 2;  // byte after the halves
  uint nibbles[E / 4];
  uint shift;
  uint fifths;
  half d;
  half m;

  void load(const device uchar* block, uint at) {
    d = load_half(block);
    m = biased ? load_half(block + 2) : half(0);
    fifths = 0;
    if constexpr (bits == 5) {
      const device uchar* of_run = block + first + at / 8;
      fifths = E == 16 ? uint(*(const device ushort*)of_run) : uint(*of_run);
    }
    load_words(block + (first + 4 * (bits == 5)) + at % 16, nibbles);
    shift = at / 16 * 4;
  }
  uint integers(int p) const {
    const uint four = nibbles[p] >> shift & 0x0f0f0f0fu;
    return bits == 5 ? four | spread<4>(fifths >> (4 * p)) : four;
  }
  float scale() const {
    return float(d);
  }
  float bias() const {
    return float(m);
  }
};

template <int E>
struct Block<q8_0, E> {
  using Shape = BlockShape<34, 32, 128, false>;
  uint numbers[E / 4];
  half d;

  void load(const device uchar* block, uint at) {
    d = load_half(block);
    load_words(block + 2 + at, numbers);
  }
  uint integers(int p) const {
    return numbers[p] ^ 0x80808080u;
  }
  float scale() const {
    return float(d);
  }
};

// --- 256 weights in groups of 32, with a scale and a minimum of 6 bits: q4_k, q5_k, whose blocks begin on 16 bytes

template <int E, bool fifth>
struct GroupBlock {
  using Shape = BlockShape<fifth ? 176 : 144, 256, fifth ? 16 : 8, true>;
  uint words[E / 4];
  uint shift;  // of nibbles
  float times;
  float plus;

  void load(const device uchar* block, uint at) {
    const uint group = at / 32;
    shift = group % 2 * 4;
    const device uchar* bits = block + 4 + group % 4;
    const uint first = bits[0], second = bits[4], third = bits[8];
    times = float(load_half(block)) * float(group < 4 ? first & 63 : (third & 15) | first >> 6 << 4);
    plus = -float(load_half(block + 2)) * float(group < 4 ? second & 63 : third >> 4 | second >> 6 << 4);
    load_uints((const device uint*)(block + (fifth ? 48 : 16) + (group / 2 * 32 + at % 32)), words);
    if constexpr (fifth) {
      uint fifths[E / 4];
      load_uints((const device uint*)(block + 16 + at % 32), fifths);
#pragma unroll
      for (int p = 0; p < E / 4; ++p) {
        words[p] = nibbles(p) | (fifths[p] >> group & 0x01010101u) << 4;
      }
    }
  }
  uint nibbles(int p) const {
    return words[p] >> shift & 0x0f0f0f0fu;
  }
  uint integers(int p) const {
    return fifth ? words[p] : nibbles(p);
  }
  float scale() const {
    return times;
  }
  float bias() const {
    return plus;
  }
};

// --- 256 weights in groups of 16: the four runs of 32 columns among 128 share 32 bytes, each with its bits

template <int E>
struct Block<q2_k, E> {
  using Shape = BlockShape<84, 256, 2, true>;
  uint pairs[E / 4];
  uint shift;
  half d;
  half m;
  uchar bits;  // of the scale and the minimum

  void load(const device uchar* block, uint at) {
    bits = block[at / 16];
    load_words(block + 16 + (at / 128 * 32 + at % 32), pairs);
    shift = at % 128 / 32 * 2;
    d = load_half(block + 80);
    m = load_half(block + 82);
  }
  uint integers(int p) const {
    return pairs[p] >> shift & 0x03030303u;
  }
  float scale() const {
    return float(d) * float(bits & 15);
  }
  float bias() const {
    return -float(m) * float(bits >> 4);
  }
};

template <int E>
struct Block<q3_k, E> {
  using Shape = BlockShape<110, 256, 4, false>;
  uint words[E / 4];
  float times;

  void load(const device uchar* block, uint at) {
    uint thirds[E / 4];
    load_words(block + at % 32, thirds);
    load_words(block + 32 + (at / 128 * 32 + at % 32), words);
#pragma unroll
    for (int p = 0; p < E / 4; ++p) {
      const uint third = thirds[p] >> (at / 32) & 0x01010101u;
      words[p] = (words[p] >> (at % 128 / 32 * 2) & 0x03030303u) | third << 2;
    }
    const uint lower = block[96 + at / 16 % 8] >> (at / 128 * 4) & 15;
    const uint upper = block[104 + at / 16 % 4] >> (at / 64 * 2) & 3;
    times = float(load_half(block + 108)) * (float(lower | upper << 4) - 32.0f);
  }
  uint integers(int p) const {
    return words[p];
  }
  float scale() const {
    return times;
  }
};

template <int E>
struct Block<q6_k, E> {
  using Shape = BlockShape<210, 256, 32, false>;
  uint nibbles[E / 4];
  uint pairs[E / 4];
  uint at;
  half d;
  uchar bits;  // of the scale

  void load(const device uchar* block, uint column) {
    at = column;
    load_words(block + (at / 128 * 64 + at % 64), nibbles);
    load_words(block + 128 + (at / 128 * 32 + at % 32), pairs);
    bits = block[192 + at / 16];
    d = load_half(block + 208);
  }
  uint integers(int p) const {
    const uint upper = pairs[p] >> (at % 128 / 32 * 2) & 0x03030303u;
    return (nibbles[p] >> (at % 128 / 64 * 4) & 0x0f0f0f0fu) | upper << 4;
  }
  float scale() const {
    return float(d) * (float(bits ^ 128) - 128.0f);
  }
};

// --- 4 bits that stand for one of 16 values: iq4_nl, iq4_xs

// The values, 128 larger.
constant constexpr uchar iq4_values[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

inline uint iq4_word(uint four) {
  uint word = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    word |= uint(iq4_values[four >> (8 * i) & 15]) << (8 * i);
  }
  return word;
}

template <int E>
struct Block<iq4_nl, E> {
  using Shape = BlockShape<18, 32, 128, false>;
  SmallBlock<E, 4, false> indices;

  void load(const device uchar* block, uint at) {
    indices.load(block, at);
  }
  uint integers(int p) const {
    return iq4_word(indices.integers(p));
  }
  float scale() const {
    return indices.scale();
  }
};

template <int E>
struct Block<iq4_xs, E> {
  using Shape = BlockShape<136, 256, 128, false>;
  uint nibbles[E / 4];
  uint at;
  half d;
  ushort upper;  // bits of the scales
  uchar lower;

  void load(const device uchar* block, uint column) {
    at = column;
    d = load_half(block);
    upper = *(const device ushort*)(block + 2);
    lower = block[4 + at / 64];
    load_words(block + 8 + (at / 32 * 16 + at % 16), nibbles);
  }
  uint integers(int p) const {
    return iq4_word(nibbles[p] >> (at % 32 / 16 * 4) & 0x0f0f0f0fu);
  }
  float scale() const {
    const uint six = (lower >> (at % 64 / 32 * 4) & 15u) | (upper >> (at / 32 * 2) & 3u) << 4;
    return float(d) * (float(six) - 32.0f);
  }
};

// --- floats of 4 bits: mxfp4, nvfp4

template <int E>
struct Block<block_mxfp4, E> {
  using Shape = BlockShape<17, 32, 0, false>;
  uint nibbles[E / 4];
  uint shift;
  uchar exponent;

  // odd: whether the block begins on an odd byte. On even ones its nibbles do not begin on 2 bytes: loads begin a byte
  // before them.
  void load(const device uchar* block, uint at, bool odd) {
    exponent = block[0];
    const device uchar* first = block + (1 + at % 16);
    load_words(first - (odd ? 0 : 1), nibbles);
    const uint last = first[E - 1];
#pragma unroll
    for (int p = 0; p < E / 4; ++p) {
      const uint next = p + 1 < E / 4 ? nibbles[p + 1] : last;
      nibbles[p] = odd ? nibbles[p] : nibbles[p] >> 8 | next << 24;
    }
    shift = at / 16 * 4;
  }
  uint integers(int p) const {
    return nibbles[p] >> shift & 0x0f0f0f0fu;
  }
  float scale() const {
    return as_type<float>(exponent < 2 ? 0x00200000u << exponent : uint(exponent - 1) << 23);
  }
};

template <int E>
struct Block<block_nvfp4, E> {
  using Shape = BlockShape<36, 64, 0, false>;
  uint nibbles[2];
  uint shift;
  uchar bits;  // of the scale

  void load(const device uchar* block, uint at) {
    bits = block[at / 16];
    load_words(block + 4 + at / 16 * 8, nibbles);
    shift = at % 16 / 8 * 4;
  }
  uint integers(int p) const {
    return nibbles[p % 2] >> (E == 16 ? p / 2 * 4 : shift) & 0x0f0f0f0fu;
  }
  // The largest number is none, and 0.
  float scale() const {
    const uint size = bits == 0x7f ? 0 : bits & 0x7f;
    return float(as_type<half>(ushort(size << 7))) * 128.0f;
  }
};

// The type of a kind's block. Metal has no derived classes.
template <BlockKind kind, int E>
struct BlockType {
  using type = Block<kind, E>;
};
template <int E>
struct BlockType<q4_0, E> {
  using type = SmallBlock<E, 4, false>;
};
template <int E>
struct BlockType<q4_1, E> {
  using type = SmallBlock<E, 4, true>;
};
template <int E>
struct BlockType<q5_0, E> {
  using type = SmallBlock<E, 5, false>;
};
template <int E>
struct BlockType<q5_1, E> {
  using type = SmallBlock<E, 5, true>;
};
template <int E>
struct BlockType<q4_k, E> {
  using type = GroupBlock<E, false>;
};
template <int E>
struct BlockType<q5_k, E> {
  using type = GroupBlock<E, true>;
};
template <BlockKind kind, int E>
using BlockOf = typename BlockType<kind, E>::type;

constexpr bool holds_floats(BlockKind kind) {
  return kind == block_mxfp4 || kind == block_nvfp4;
}

}  // namespace mittens
