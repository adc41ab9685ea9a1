// Packed keys and values as operands of decode_tiles.h. The integers are multiplied, not what they stand for. As halfs
// they are a mask away, with 1024 on top, which the products of keys keep. For W columns that have a scale s and a bias b
//
//   q k = s (q (1024 + n)) + (b - 1024 s) sum(q)
//   p v = (p s) n + p b
//
// so that the first takes two multiply-adds for W columns, and in the second the scale goes into the weights. As scales
// may be of any size, these have a maximum of their own, as the softmax has: of log2(p s), from the row's maximum on.
//
// Queries are halfs with an exponent for each row, whatever their type.
#pragma once

#include "attention/decode_mma.h"

namespace mittens {

// W neighbouring columns have one scale and one bias.
template <typename T, int bits, int W, int D, int B>
struct PackedTiles {
  using Shape = TileShape<D, B, (W < 64 || D * B > 128 ? 1 : 2), W / 4, W / 8, B == 1>;
  static constant constexpr bool prompts = B > 1;  // whether these come here
  static constant constexpr int group = W;
  static constant constexpr int columns = D;
  static constant constexpr int per_word = 32 / bits;
  static constant constexpr int key_words = Shape::key_elements / per_word;
  static constant constexpr int value_words = (Shape::value_elements * bits + 31) / 32;
  static constant constexpr int blocks = D / W;
  // Of the lane's neighbours the one that is element e of its pair t: integers of the halves of a word.
  static constexpr int paired(int t, int e) {
    return t / (per_word / 2) * per_word + t % (per_word / 2) + e * (per_word / 2);
  }

  // Of the key in the lane's row, for each block; two in a word.
  struct Affine {
    uint scales[(blocks + 1) / 2];
    uint biases[(blocks + 1) / 2];
  };
  struct Keys {
    uint words[Shape::C][blocks][key_words];
    Affine affine[Shape::C];
  };
  struct Values {
    uint words[Shape::C][2][blocks][value_words];
    Affine affine[Shape::C];
  };

  PackedRows<T, bits> keys;
  PackedRows<T, bits> values;
  Fragments<half, D / 8> queries[B];
  float2 query_sums[B][blocks];
  float2 units[B];  // of a row's scores
  Tile<float, B, D / 8> sums;
  float2 tops[B][blocks];  // the largest log2(p s), from the row's maximum on
  float2 biases[B][blocks];  // sums of p b
};

constant constexpr float offset_value = 1024.0f;
constant constexpr uchar offset_byte = 0x64;  // the upper one of 1024 as a half

// Two integers, from bit `shift` of each half word on. Bytes are put together, which NVIDIA GPUs do for two of them with one
// constant in a register; a mask and the offset would be two.
template <int bits>
inline half2 offset_integers(uint word, int shift) {
  const uchar4 bytes = as_type<uchar4>(bits == 8 ? word : (word >> shift % 8) & 0x0f0f0f0fu);
  return as_type<half2>(
      shift < 8 ? uchar4(bytes.x, offset_byte, bytes.z, offset_byte) : uchar4(bytes.y, offset_byte, bytes.w, offset_byte));
}

// E neighbours of a row. whole: it is there, for all lanes, and aligned.
template <bool whole, int E, int words, typename T, int bits>
inline void load_integers(PackedRows<T, bits> row, uint column, uint width, bool there, thread uint (&to)[words]) {
  const device uchar* p = row.bytes + loaded_column(column, width) * bits / 8;
  if constexpr (whole && E * bits >= 32) {
    load_words_at<words>((const device uint*)p, to);
  } else {
#pragma unroll
    for (int i = 0; i < words; ++i) {
      to[i] = 0;
      if (whole || there) {
        if constexpr (E * bits < 32) {
          to[i] = *(const device ushort*)p;
        } else {
          to[i] = ((const device uint*)p)[i];
        }
      }
    }
  }
}

// Scales or biases of a row's blocks. pairs: each block has its own, and two of them are aligned.
template <bool pairs, int W, int words, typename T>
inline void load_affine(const device T* from, uint group_shift, uint width, bool there, thread uint (&to)[words]) {
#pragma unroll
  for (int i = 0; i < words; ++i) {
    if constexpr (pairs) {
      to[i] = ((const device uint*)from)[i];
    } else {
      to[i] = 0;
      if (there) {
        const uint first = loaded_column(2 * i * W, width) >> group_shift;
        const uint second = loaded_column((2 * i + 1) * W, width) >> group_shift;
        to[i] = uint(as_type<ushort>(from[first])) | uint(as_type<ushort>(from[second])) << 16;
      }
    }
  }
}

template <bool pairs, typename Tiles, typename T, int bits>
inline void load_affine(PackedRows<T, bits> row, uint width, bool there, thread typename Tiles::Affine& to) {
  load_affine<pairs, Tiles::group>(row.scales, row.group_shift, width, there, to.scales);
  load_affine<pairs, Tiles::group>(row.biases, row.group_shift, width, there, to.biases);
}

template <typename Tiles, typename T, int bits>
inline bool has_pairs(PackedRows<T, bits> rows, uint width) {
  return Tiles::blocks % 2 == 0 && width == Tiles::columns && Tiles::group == 1 << rows.group_shift;
}

// Of block g.
template <typename T, int words>
inline float affine_of(thread const uint (&from)[words], int g) {
  return float(as_type<T>(ushort(from[g / 2] >> (16 * (g % 2)) & 0xffffu)));
}

template <bool whole, bool pairs, typename T, int bits, int W, int D, int B>
inline void load_packed(
    thread const PackedTiles<T, bits, W, D, B>& own, uint first, uint end, uint width, uint lane,
    thread typename PackedTiles<T, bits, W, D, B>::Keys& to) {
  using Tiles = PackedTiles<T, bits, W, D, B>;
  constexpr int E = Tiles::Shape::key_elements;
  const uint key = first + tile_row(lane);
  const PackedRows<T, bits> from = at_row(own.keys, key);
#pragma unroll
  for (int c = 0; c < Tiles::Shape::C; ++c) {
    const PackedRows<T, bits> row = at_row(from, c * 8);
    const bool there = whole || key + c * 8 < end;
#pragma unroll
    for (int g = 0; g < Tiles::blocks; ++g) {
      load_integers<whole, E>(row, g * Tiles::group + tile_column(lane) / 2 * E, width, there, to.words[c][g]);
    }
    load_affine<pairs, Tiles>(row, width, there, to.affine[c]);
  }
}

template <bool whole, bool pairs, typename T, int bits, int W, int D, int B>
inline void load_packed(
    thread const PackedTiles<T, bits, W, D, B>& own, uint first, uint end, uint width, uint lane,
    thread typename PackedTiles<T, bits, W, D, B>::Values& to) {
  using Tiles = PackedTiles<T, bits, W, D, B>;
  constexpr int V = Tiles::Shape::value_elements;
  const uint key = first + tile_column(lane);
  const uint own_key = first + tile_row(lane);
  const PackedRows<T, bits> from = at_row(own.values, key);
  const PackedRows<T, bits> own_from = at_row(own.values, own_key);
#pragma unroll
  for (int c = 0; c < Tiles::Shape::C; ++c) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const PackedRows<T, bits> row = at_row(from, c * 8 + i);
      const bool there = whole || key + c * 8 + i < end;
#pragma unroll
      for (int g = 0; g < Tiles::blocks; ++g) {
        load_integers<whole, V>(row, g * Tiles::group + tile_row(lane) * V, width, there, to.words[c][i][g]);
      }
    }
    load_affine<pairs, Tiles>(at_row(own_from, c * 8), width, whole || own_key + c * 8 < end, to.affine[c]);
  }
}

// Of keys or values, which are packed alike.
template <bool whole, typename T, int bits, int W, int D, int B, typename Loaded>
inline void load_tiles(
    thread const PackedTiles<T, bits, W, D, B>& own, Whole<whole>, uint first, uint end, uint width, uint lane,
    thread Loaded& to) {
  if (whole && has_pairs<PackedTiles<T, bits, W, D, B>>(own.keys, width)) {
    load_packed<whole, true>(own, first, end, width, lane, to);
  } else {
    load_packed<whole, false>(own, first, end, width, lane, to);
  }
}

template <typename T, int bits, int W, int D, int B>
inline void load_queries(
    thread PackedTiles<T, bits, W, D, B>& own, DecodeRows<T> rows, bool wanted, uint lane, uint, threadgroup float*,
    constant AttentionParams& params) {
  using Tiles = PackedTiles<T, bits, W, D, B>;
  Fragments<T, D / 8> queries[B];
  load_query_pairs<Tiles>(queries, rows, wanted, lane, params);
#pragma unroll
  for (int b = 0; b < B; ++b) {
    float2 largest = float2(0.0f);
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      largest = max(largest, abs(float2(queries[b].at[n])));
    }
    largest = lanes_of_column_max(largest);
    float2 to_half;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint exponent = clamp(as_type<uint>(largest[i]) >> 23, 1u, 253u);
      own.units[b][i] = as_type<float>(exponent << 23) * params.scale;
      to_half[i] = as_type<float>((254u - exponent) << 23);
    }
#pragma unroll
    for (int g = 0; g < Tiles::blocks; ++g) {
      float2 sum = float2(0.0f);
#pragma unroll
      for (int n = g * W / 8; n < (g + 1) * W / 8; ++n) {
        own.queries[b].at[n] = half2(float2(queries[b].at[n]) * to_half);
        sum += float2(own.queries[b].at[n]);
      }
      own.query_sums[b][g] = lanes_of_column_sum(sum);
    }
  }
}

template <typename T, int bits, int W, int D, int B>
inline void clear(thread PackedTiles<T, bits, W, D, B>& own) {
  fill(own.sums, 0.0f);
#pragma unroll
  for (int b = 0; b < B; ++b) {
#pragma unroll
    for (int g = 0; g < D / W; ++g) {
      own.tops[b][g] = float2(-INFINITY);
      own.biases[b][g] = float2(0.0f);
    }
  }
}

template <typename T, int bits, int W, int D, int B, int C>
inline void multiply_keys(
    thread const PackedTiles<T, bits, W, D, B>& own, thread const typename PackedTiles<T, bits, W, D, B>::Keys& keys,
    thread Tile<float, B, C>& scores, constant AttentionParams& params) {
  using Tiles = PackedTiles<T, bits, W, D, B>;
  constexpr int in_word = Tiles::per_word / 2;  // pairs
  fill(scores, 0.0f);
#pragma unroll
  for (int g = 0; g < Tiles::blocks; ++g) {
    Tile<float, B, C> products;
    fill(products, 0.0f);
#pragma unroll
    for (int t = 0; t < W / 8; ++t) {
#pragma unroll
      for (int b = 0; b < B; ++b) {
#pragma unroll
        for (int c = 0; c < C; ++c) {
          const half2 pair = offset_integers<bits>(keys.words[c][g][t / in_word], bits * (t % in_word));
          products.at[b][c] = multiply_tiles<half>(pair, own.queries[b].at[g * W / 8 + t], products.at[b][c]);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const float scale = affine_of<T>(keys.affine[c].scales, g);
      const float bias = fma(scale, -offset_value, affine_of<T>(keys.affine[c].biases, g));
#pragma unroll
      for (int b = 0; b < B; ++b) {
        scores.at[b][c] = fma(products.at[b][c], float2(scale), fma(own.query_sums[b][g], float2(bias), scores.at[b][c]));
      }
    }
  }
#pragma unroll
  for (int b = 0; b < B; ++b) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      scores.at[b][c] *= own.units[b];
    }
  }
}

// log2 of what a weight of 1 is multiplied by.
inline float scale_exponent(float scale) {
  return fast::log2(abs(scale));
}

template <typename T, int bits, int W, int D, int B, int C>
inline bool outgrow(
    thread const PackedTiles<T, bits, W, D, B>& own, int b,
    thread const typename PackedTiles<T, bits, W, D, B>::Values& values, thread const Tile<float, B, C>& scores,
    float2 maximum) {
  bool grew = false;
#pragma unroll
  for (int c = 0; c < C; ++c) {
#pragma unroll
    for (int g = 0; g < D / W; ++g) {
      const float2 top = scores.at[b][c] - maximum + scale_exponent(affine_of<T>(values.affine[c].scales, g));
      grew = grew || exceeds(top, own.tops[b][g]);
    }
  }
  return grew;
}

template <typename T, int bits, int W, int D, int B, int C>
inline void rescale(
    thread PackedTiles<T, bits, W, D, B>& own, int b,
    thread const typename PackedTiles<T, bits, W, D, B>::Values& values, thread const Tile<float, B, C>& scores,
    float2 maximum, float2 raised, float2 factor) {
#pragma unroll
  for (int g = 0; g < D / W; ++g) {
    const float2 top = own.tops[b][g] - (raised - maximum);
    float2 largest = float2(-INFINITY);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      largest = max(largest, scores.at[b][c] - raised + scale_exponent(affine_of<T>(values.affine[c].scales, g)));
    }
    own.tops[b][g] = max(top, lanes_of_column_max(largest));
    const float2 of_block = softmax_weights<T>(top - finite_maximum(own.tops[b][g]));
#pragma unroll
    for (int n = g * W / 8; n < (g + 1) * W / 8; ++n) {
      own.sums.at[b][n] *= of_block;
    }
    own.biases[b][g] *= factor;
  }
}

template <typename T, int bits, int W, int D, int B, int C>
inline void add_values(
    thread PackedTiles<T, bits, W, D, B>& own, thread const typename PackedTiles<T, bits, W, D, B>::Values& values,
    thread const Tile<float, B, C>& distances) {
  using Tiles = PackedTiles<T, bits, W, D, B>;
  constexpr int V = Tiles::Shape::value_elements;
  constexpr int in_half = 16 / bits;  // integers of half a word
#pragma unroll
  for (int c = 0; c < C; ++c) {
#pragma unroll
    for (int g = 0; g < Tiles::blocks; ++g) {
      const float scale = affine_of<T>(values.affine[c].scales, g);
      const float bias = affine_of<T>(values.affine[c].biases, g);
      const float exponent = scale_exponent(scale);
      half2 weights[B];
#pragma unroll
      for (int b = 0; b < B; ++b) {
        const float2 scaled = softmax_weights<T>(distances.at[b][c] + exponent - finite_maximum(own.tops[b][g]));
        weights[b] = half2(scale < 0 ? -scaled : scaled);
        own.biases[b][g] = fma(softmax_weights<T>(distances.at[b][c]), float2(bias), own.biases[b][g]);
      }
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const int half_word = e / in_half;
        const uint both =
            side_by_side(values.words[c][0][g][half_word / 2], values.words[c][1][g][half_word / 2], half_word % 2);
        const half2 pair = offset_integers<bits>(both, bits * (e % in_half)) - half2(half(offset_value));
#pragma unroll
        for (int b = 0; b < B; ++b) {
          own.sums.at[b][g * V + e] = multiply_tiles<half>(pair, weights[b], own.sums.at[b][g * V + e]);
        }
      }
    }
  }
}

template <typename T, int bits, int W, int D, int B>
inline void complete(thread PackedTiles<T, bits, W, D, B>& own) {
#pragma unroll
  for (int b = 0; b < B; ++b) {
#pragma unroll
    for (int g = 0; g < D / W; ++g) {
      const float2 factor = softmax_weights<T>(own.tops[b][g]);
      const float2 bias = lanes_of_column_sum(own.biases[b][g]);
#pragma unroll
      for (int n = g * W / 8; n < (g + 1) * W / 8; ++n) {
        own.sums.at[b][n] = fma(own.sums.at[b][n], factor, bias);
      }
    }
  }
}

}  // namespace mittens
