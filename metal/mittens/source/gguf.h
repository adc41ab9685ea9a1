// Rows of GGUF blocks, byte for byte as a .gguf file stores them. Blocks begin on any 2 bytes unless said otherwise,
// mxfp4's on any byte. d, m: halves.
//
//   kind     bytes, weights   w              layout
//   q4_0      18,  32   d * (v - 8)          d, nibbles
//   q4_1      20,  32   d * v + m            d, m, nibbles
//   q5_0      22,  32   d * (v - 16)         d, fifths, nibbles
//   q5_1      24,  32   d * v + m            d, m, fifths, nibbles
//   q8_0      34,  32   d * v                d, signed bytes
//   iq4_nl    18,  32   d * value[v]         as q4_0
//   q2_k      84, 256   d * s * v - m * t    16 bytes of s and t, pairs, d, m
//   q3_k     110, 256   d * s * (v - 4)      thirds, pairs, 12 bytes of s, d
//   q4_k     144, 256   d * s * v - m * t    d, m, 12 bytes of s and t, nibbles
//   q5_k     176, 256   d * s * v - m * t    d, m, 12 bytes of s and t, fifths, nibbles
//   q6_k     210, 256   d * s * (v - 32)     nibbles, pairs above them, 16 signed bytes s, d
//   iq4_xs   136, 256   d * s * value[v]     d, 2 bits of each s, 4 bits of each s, nibbles
//   mxfp4     17,  32   2^(e - 128) * f      a byte e, nibbles
//   nvfp4     36,  64   s / 2 * f            4 bytes s, floats of 4 bits of exponent and 3 of the fraction; nibbles
//
// f is twice a float of a sign, 2 bits of exponent and 1 of the fraction. In nvfp4 nibbles of 16 columns are 8 bytes,
// column i below and i + 8 above.
// Nibbles of 32 columns are 16 bytes, column i below and i + 16 above; in q4_k to q6_k of 64 columns 32 bytes. s and t
// are integers of 16 or 32 columns.
//
// A run of columns has one scale and one bias. Its integers become bytes, four of a word, and these become halves as in
// mittens/source/integers.h; here the base is small, so that no sum of products overflows before the scale.
#pragma once

#include "mittens/instantiate.h"
#include "mittens/source/integers.h"
#include "mittens/source/gguf_blocks.h"

namespace mittens {

// A run of a block as values of products by rows (matmul/row_products.h). Bytes become the mantissa of 1 / 64, or of
// 1024 where sums are of weights and not of integers. Floats of 4 bits become a half's bits, too small by a power of
// two.
template <BlockKind kind, int E, bool of_weights>
struct BlockValues {
  using Words = BlockOf<kind, E>;
  static constant constexpr int size = E;
  static constant constexpr int levels = 1;

  static constexpr int level(int) {
    return 0;
  }
  static constexpr float factor(int) {
    return holds_floats(kind) ? 1.0f / 32768 : of_weights ? 1.0f : 1.0f / 65536;
  }
  static constant constexpr float base = holds_floats(kind) ? 0.0f : of_weights ? 1024.0f : 1.0f / 64;
  static constant constexpr float middle = float(Words::Shape::zero);
  static constant constexpr float headroom = 1.0f / 64;

  static half2 pair(uint bytes) {
    if constexpr (holds_floats(kind)) {
      return as_type<half2>((bytes << 9 & 0x0e000e00u) | (bytes << 12 & 0x80008000u));
    } else {
      return as_type<half2>((bytes & 0x00ff00ffu) | (of_weights ? 0x64006400u : 0x24002400u));
    }
  }

  static void unpack(Words run, thread half (&q)[E]) {
#pragma unroll
    for (int p = 0; p < E / 4; ++p) {
      const uint word = run.integers(p);
      const half2 even = pair(word);
      const half2 odd = pair(word >> 8);
      q[4 * p] = even.x;
      q[4 * p + 1] = odd.x;
      q[4 * p + 2] = even.y;
      q[4 * p + 3] = odd.y;
    }
  }
};

// A matrix from some row on.
template <BlockKind kind, int E, bool of_weights = false>
struct BlockRows {
  using Values = BlockValues<kind, E, of_weights>;
  using Block = BlockOf<kind, E>;
  static constant constexpr bool has_bias = Block::Shape::has_bias;
  static constant constexpr bool fits_half = false;  // a scale times an integer, rounded, shows in sums
  static constant constexpr bool on_any_byte = Block::Shape::bytes % 2 == 1;
  struct Run {
    Block words;
  };
  const device uchar* blocks;  // on an even byte
  uint stride;                 // bytes from row to row
  uint before;                 // the first row, where rows begin on any byte

  Run load(uint row, uint more, uint column) const {
    constexpr uint weights = Block::Shape::weights;
    const uint at = (row + more) * stride + column / weights * Block::Shape::bytes;
    Run run;
    if constexpr (on_any_byte) {
      run.words.load(blocks + (before + at), column % weights, (before + at) % 2 == 1);
    } else {
      run.words.load(blocks + at, column % weights);
    }
    return run;
  }

  static float scale(Run run) {
    return run.words.scale();
  }
  static float bias(Run run) {
    if constexpr (has_bias) {
      return run.words.bias();
    } else {
      return 0.0f;
    }
  }

  // The matrix from another row on; alone: with all of its rows at that one.
  BlockRows at(uint row, bool alone) const {
    const size_t bytes = size_t(row) * stride;
    if constexpr (on_any_byte) {
      return {blocks + bytes / 2 * 2, alone ? 0 : stride, uint(bytes % 2)};
    } else {
      return {blocks + bytes, alone ? 0 : stride, 0};
    }
  }
};

}  // namespace mittens

// One instantiation for each kind and element type, called <name>_<kind><suffix>_<dtype>.
#define instantiate_kinds(name, suffix, function, ...)                             \
  instantiate_types(name "_q4_0" suffix, function, q4_0, ##__VA_ARGS__)             \
  instantiate_types(name "_q4_1" suffix, function, q4_1, ##__VA_ARGS__)             \
  instantiate_types(name "_q5_0" suffix, function, q5_0, ##__VA_ARGS__)             \
  instantiate_types(name "_q5_1" suffix, function, q5_1, ##__VA_ARGS__)             \
  instantiate_types(name "_q8_0" suffix, function, q8_0, ##__VA_ARGS__)             \
  instantiate_types(name "_q2_k" suffix, function, q2_k, ##__VA_ARGS__)             \
  instantiate_types(name "_q3_k" suffix, function, q3_k, ##__VA_ARGS__)             \
  instantiate_types(name "_q4_k" suffix, function, q4_k, ##__VA_ARGS__)             \
  instantiate_types(name "_q5_k" suffix, function, q5_k, ##__VA_ARGS__)             \
  instantiate_types(name "_q6_k" suffix, function, q6_k, ##__VA_ARGS__)             \
  instantiate_types(name "_iq4_nl" suffix, function, iq4_nl, ##__VA_ARGS__)         \
  instantiate_types(name "_iq4_xs" suffix, function, iq4_xs, ##__VA_ARGS__)         \
  instantiate_types(name "_mxfp4" suffix, function, block_mxfp4, ##__VA_ARGS__)     \
  instantiate_types(name "_nvfp4" suffix, function, block_nvfp4, ##__VA_ARGS__)

// Of the common ones.
#define instantiate_common_kinds(name, suffix, function, ...)                      \
  instantiate_types(name "_q4_0" suffix, function, q4_0, ##__VA_ARGS__)             \
  instantiate_types(name "_q8_0" suffix, function, q8_0, ##__VA_ARGS__)             \
  instantiate_types(name "_q4_k" suffix, function, q4_k, ##__VA_ARGS__)             \
  instantiate_types(name "_q5_k" suffix, function, q5_k, ##__VA_ARGS__)             \
  instantiate_types(name "_q6_k" suffix, function, q6_k, ##__VA_ARGS__)
