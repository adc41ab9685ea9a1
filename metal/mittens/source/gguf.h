// Rows of GGUF blocks, byte for byte as a .gguf file stores them. Blocks begin on any 2 bytes.
//
//   q4_0   18 bytes for 32 weights   w = d * (q - 8)     d, then byte i of 16 has q[i] below and q[i + 16] above
//   q8_0   34 bytes for 32 weights   w = d * q           d, then signed bytes
//
// d is a half. A run of columns has one scale. Its integers become bytes, four of a word, and these become halves as in
// mittens/source/integers.h; here the base is small, so that no sum of products overflows before the scale.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace mittens {

enum BlockKind { q4_0, q8_0 };

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

// E columns of a block of weights, as they lie in memory.
//   load(block, at)   from column `at` on, a multiple of E
//   integers(bytes)   v + zero, four of a word; w = scale() * v, or scale() * (v + zero) + bias() where there is one
template <BlockKind kind, int E>
struct Block;

template <int E>
struct Block<q4_0, E> {
  static constant constexpr int bytes = 18;
  static constant constexpr int weights = 32;
  static constant constexpr int zero = 8;
  static constant constexpr bool has_bias = false;
  uint nibbles[E / 4];
  uint shift;
  half d;

  void load(const device uchar* block, uint at) {
    d = load_half(block);
    load_words(block + 2 + at % 16, nibbles);
    shift = at / 16 * 4;
  }
  uint integers(int word) const {
    return nibbles[word] >> shift & 0x0f0f0f0fu;
  }
  float scale() const {
    return float(d);
  }
  float bias() const {
    return 0.0f;
  }
};

template <int E>
struct Block<q8_0, E> {
  static constant constexpr int bytes = 34;
  static constant constexpr int weights = 32;
  static constant constexpr int zero = 128;
  static constant constexpr bool has_bias = false;
  uint numbers[E / 4];
  half d;

  void load(const device uchar* block, uint at) {
    d = load_half(block);
    load_words(block + 2 + at, numbers);
  }
  uint integers(int word) const {
    return numbers[word] ^ 0x80808080u;
  }
  float scale() const {
    return float(d);
  }
  float bias() const {
    return 0.0f;
  }
};

// A run of a block as values of products by rows (matmul/rows.h).
template <BlockKind kind, int E>
struct BlockValues {
  static constant constexpr int size = E;
  static constant constexpr int levels = 1;

  static constexpr int level(int) {
    return 0;
  }
  static constexpr float factor(int) {
    return 1.0f / 65536;
  }
  static constexpr float base() {
    return 1.0f / 64;
  }
  static constexpr float middle() {
    return float(Block<kind, E>::zero);
  }
  static constexpr float headroom() {
    return 1.0f / 64;
  }

  static void unpack(Block<kind, E> run, thread half (&q)[E]) {
#pragma unroll
    for (int p = 0; p < E / 4; ++p) {
      const uint word = run.integers(p);
      const half2 even = as_type<half2>((word & 0x00ff00ffu) | 0x24002400u);
      const half2 odd = as_type<half2>((word >> 8 & 0x00ff00ffu) | 0x24002400u);
      q[4 * p] = even.x;
      q[4 * p + 1] = odd.x;
      q[4 * p + 2] = even.y;
      q[4 * p + 3] = odd.y;
    }
  }
};

// A matrix from some row on.
template <BlockKind kind, int E>
struct BlockRows {
  using Values = BlockValues<kind, E>;
  static constant constexpr bool has_bias = Block<kind, E>::has_bias;
  struct Run {
    Block<kind, E> words;
  };
  const device uchar* blocks;
  uint stride;  // bytes from row to row

  // Columns [column, column + E) of a row; column is a multiple of E.
  Run load(uint row, uint column) const {
    constexpr uint weights = Block<kind, E>::weights;
    Run run;
    run.words.load(blocks + (row * stride + column / weights * Block<kind, E>::bytes), column % weights);
    return run;
  }

  static float scale(Run run) {
    return run.words.scale();
  }
  static float bias(Run run) {
    return run.words.bias();
  }

  // The matrix from another row on; alone: with all of its rows at that one.
  BlockRows at(uint row, bool alone) const {
    return {blocks + size_t(row) * stride, alone ? 0 : stride};
  }
};

}  // namespace mittens
