// Keys and values as operands of decode_tiles.h: what is loaded is multiplied as it is.
#pragma once

#include "attention/decode_mma.h"

namespace mittens {

// Of B blocks of 8 rows, N fragments each: in half types in registers.
template <typename T, int N, int B>
struct Queries {
  Fragments<T, N> at[B];
};

// In float32 there are no registers for them: they lie in threadgroup memory, where all simdgroups have the same ones, two
// fragments of a lane side by side.
template <int N, int B>
struct Queries<float, N, B> {
  threadgroup float4* lane;
};

template <typename T, int N, int B>
inline vec<T, 2> query_pair(thread const Queries<T, N, B>& queries, int b, int n) {
  if constexpr (sizeof(T) == 4) {
    const float4 two = queries.lane[(b * N + n) / 2 * 32];
    return n % 2 == 0 ? two.xy : two.zw;
  } else {
    return queries.at[b].at[n];
  }
}

template <typename T, int D, int B>
struct PlainTiles {
  static constant constexpr bool full = sizeof(T) == 4;
  using Shape =
      TileShape<D, B, (B > 1 || full ? 1 : 128 / D), pack_size<T>(), pack_size<T>(), (D * B <= 128)>;
  static constant constexpr bool prompts = B > 1 || full;  // whether these come here
  // Of the lane's neighbours the one that is element e of its pair t.
  static constexpr int paired(int t, int e) {
    return 2 * t + e;
  }

  struct Keys {
    LoadedRows<PlainRows<T>, Shape::key_elements, Shape::key_loads> at[Shape::C];
  };
  struct Values {
    LoadedRows<PlainRows<T>, Shape::value_elements, Shape::value_loads> at[Shape::C][2];
  };

  PlainRows<T> keys;
  PlainRows<T> values;
  Queries<T, D / 8, B> queries;
  Tile<float, B, D / 8> sums;
};

// What a lane has of one row, from column `column` on and every `apart` columns; zeros where the row is not there. whole:
// it is there, for all lanes, and aligned.
template <bool whole, int apart, typename T, int E, int N>
inline void load_parts(
    PlainRows<T> row, uint column, uint width, bool there, thread LoadedRows<PlainRows<T>, E, N>& to) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const PlainRows<T> from = at_column(row, loaded_column(column + n * apart, width));
    if constexpr (whole) {
      load_row<true>(from, 0, to.at[n]);
    } else {
      clear_row(to.at[n]);
      if (there) {
        load_row<false>(from, 0, to.at[n]);
      }
    }
  }
}

template <bool whole, typename T, int D, int B>
inline void load_tiles(
    thread const PlainTiles<T, D, B>& own, Whole<whole>, uint first, uint end, uint width, uint lane,
    thread typename PlainTiles<T, D, B>::Keys& to) {
  using Shape = typename PlainTiles<T, D, B>::Shape;
  const uint key = first + tile_row(lane);
  const PlainRows<T> from = at_row(own.keys, key);
#pragma unroll
  for (int c = 0; c < Shape::C; ++c) {
    load_parts<whole, Shape::key_columns>(
        at_row(from, c * 8), tile_column(lane) / 2 * Shape::key_elements, width, key + c * 8 < end, to.at[c]);
  }
}

template <bool whole, typename T, int D, int B>
inline void load_tiles(
    thread const PlainTiles<T, D, B>& own, Whole<whole>, uint first, uint end, uint width, uint lane,
    thread typename PlainTiles<T, D, B>::Values& to) {
  using Shape = typename PlainTiles<T, D, B>::Shape;
  const uint key = first + tile_column(lane);
  const PlainRows<T> from = at_row(own.values, key);
#pragma unroll
  for (int c = 0; c < Shape::C; ++c) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_parts<whole, Shape::value_columns>(
          at_row(from, c * 8 + i), tile_row(lane) * Shape::value_elements, width, key + c * 8 + i < end,
          to.at[c][i]);
    }
  }
}

// Elements 2 t and 2 t + 1.
template <typename T, int W>
inline vec<T, 2> neighbours(thread const uint (&words)[W], int t) {
  if constexpr (sizeof(T) == 4) {
    return as_type<float2>(uint2(words[2 * t], words[2 * t + 1]));
  } else {
    return as_type<vec<T, 2>>(words[t]);
  }
}

template <typename T, int D, int B>
inline void load_queries(
    thread PlainTiles<T, D, B>& own, DecodeRows<T> rows, bool wanted, uint lane, uint simdgroup,
    threadgroup float* scratch, constant AttentionParams& params) {
  if constexpr (sizeof(T) == 4) {
    own.queries.lane = (threadgroup float4*)scratch + lane;
    if (simdgroup == 0) {
      Fragments<T, D / 8> queries[B];
      load_query_pairs<PlainTiles<T, D, B>>(queries, rows, true, lane, params);
#pragma unroll
      for (int b = 0; b < B; ++b) {
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
          own.queries.lane[(b * D / 8 + n) / 2 * 32] = float4(queries[b].at[n], queries[b].at[n + 1]);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    load_query_pairs<PlainTiles<T, D, B>>(own.queries.at, rows, wanted, lane, params);
  }
}

template <typename T, int D, int B>
inline void clear(thread PlainTiles<T, D, B>& own) {
  fill(own.sums, 0.0f);
}

template <typename T, int D, int B, int C>
inline void multiply_keys(
    thread const PlainTiles<T, D, B>& own, thread const typename PlainTiles<T, D, B>::Keys& keys,
    thread Tile<float, B, C>& scores, constant AttentionParams& params) {
  using Shape = typename PlainTiles<T, D, B>::Shape;
  constexpr int pairs = Shape::key_elements / 2;
  fill(scores, 0.0f);
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
#pragma unroll
    for (int b = 0; b < B; ++b) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const vec<T, 2> pair = neighbours<T>(keys.at[c].at[n / pairs].words, n % pairs);
        scores.at[b][c] = multiply_tiles<T>(pair, query_pair(own.queries, b, n), scores.at[b][c]);
      }
    }
  }
  multiply(scores, params.scale);
}

template <typename T, int D, int B, int C>
inline bool outgrow(
    thread const PlainTiles<T, D, B>&, int, thread const typename PlainTiles<T, D, B>::Values&,
    thread const Tile<float, B, C>&, float2) {
  return false;
}

template <typename T, int D, int B, int C>
inline void rescale(
    thread PlainTiles<T, D, B>& own, int b, thread const typename PlainTiles<T, D, B>::Values&,
    thread const Tile<float, B, C>&, float2, float2, float2 factor) {
#pragma unroll
  for (int n = 0; n < D / 8; ++n) {
    own.sums.at[b][n] *= factor;
  }
}

template <typename T, int D, int B, int C>
inline void add_values(
    thread PlainTiles<T, D, B>& own, thread const typename PlainTiles<T, D, B>::Values& values,
    thread const Tile<float, B, C>& distances) {
  using Shape = typename PlainTiles<T, D, B>::Shape;
  constexpr int V = Shape::value_elements;
#pragma unroll
  for (int c = 0; c < C; ++c) {
    vec<T, 2> weights[B];
#pragma unroll
    for (int b = 0; b < B; ++b) {
      const float2 weight = softmax_weights<T>(distances.at[b][c]);
      weights[b] = vec<T, 2>(T(weight.x), T(weight.y));
    }
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const int word = element_word<T>(n % V);
      const vec<T, 2> pair = element_of_both<T>(
          values.at[c][0].at[n / V].words[word], values.at[c][1].at[n / V].words[word], n % V);
#pragma unroll
      for (int b = 0; b < B; ++b) {
        own.sums.at[b][n] = multiply_tiles<T>(pair, weights[b], own.sums.at[b][n]);
      }
    }
  }
}

template <typename T, int D, int B>
inline void complete(thread PlainTiles<T, D, B>&) {}

}  // namespace mittens
