// Shared by the kernels of attention_backward.metal: products of rows that are fetched fragment by fragment, and the
// weights p and their gradients ds of a block of scores, computed again from the logsumexp of each row.
//
// Scores are in units of log2(e) for half types, whose weights are then powers of two.
#pragma once

#include "mittens/fragment_layout.h"
#include "mittens/online_softmax.h"
#include "mittens/source/dense.h"
#include "params/attention_backward.h"

namespace mittens {

// Rows of a head in packs of 16 bytes.
template <typename T>
struct HeadRows {
  Dense<T> rows;
  uint count;
};

template <typename T>
constant constexpr int pack_elements = Dense<T>::Values::size;

template <typename T>
inline HeadRows<T> head_rows(const device T* from, thread const TokenRows& view, uint batch, uint head, uint count) {
  const uint start = uint(TokenRows::at(int64_t(0), view, batch, head, 0) / pack_elements<T>);
  return {{(const device uint4*)from, start, uint(view.token / pack_elements<T>)}, count};
}

// N neighbours of a row from part `part` on, in parts of W. Beyond the last row, the last one's.
template <typename T, int W, int N>
inline void load_part(HeadRows<T> of, uint row, uint part, thread T (&v)[N]) {
  using Part = Dense<T, W>;
  const Part parts = {(const device typename Part::Load*)of.rows.from, 0, 0};
  const uint first = (of.rows.start + min(row, of.count - 1) * of.rows.stride) * (pack_elements<T> / W) + part;
#pragma unroll
  for (int i = 0; i < N / W; ++i) {
    const typename Part::Run run = parts.at(first + i);
#pragma unroll
    for (int j = 0; j < W; ++j) {
      v[i * W + j] = Part::value(run, j);
    }
  }
}

// products = a b^T of 8 * R rows of a and 8 * C of b.
template <typename T, int D, int R, int C>
inline void multiply_fetched(
    thread Tile<float, R, C>& products, HeadRows<T> a, uint first_a, HeadRows<T> b, uint first_b, uint lane) {
  // Columns meet by pairs (mittens/tile.h), W of the 2 W neighbours that a lane loads apart.
  constexpr int W = D * sizeof(T) > 256 ? pack_elements<T> / 2 : pack_elements<T>;
  fill(products, 0.0f);
#pragma unroll 1
  for (uint block = 0; block < D / W; block += 8) {
    Tile<T, R, W> left;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      T v[2 * W];
      load_part<T, W>(a, first_a + r * 8 + tile_row(lane), block + tile_column(lane), v);
#pragma unroll
      for (int t = 0; t < W; ++t) {
        left.at[r][t] = vec<T, 2>(v[t], v[W + t]);
      }
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
      T v[W];
      T w[W];
      load_part<T, W>(b, first_b + c * 8 + tile_column(lane), block + tile_row(lane), v);
      load_part<T, W>(b, first_b + c * 8 + tile_column(lane) + 1, block + tile_row(lane), w);
#pragma unroll
      for (int t = 0; t < W; ++t) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
          products.at[r][c] = multiply_tiles<T>(left.at[r][t], vec<T, 2>(v[t], w[t]), products.at[r][c]);
        }
      }
    }
  }
}

// The type of ds in products: float16 cannot hold it.
template <typename T>
using ScoreType = conditional_t<is_same_v<T, half>, float, T>;

// sums += weights rows, from row `first` on. U: the type of the products' factors.
template <typename U, typename T, int D, int R, int C>
inline void add_weighted(
    thread Tile<float, R, D / 8>& sums, thread const Tile<float, R, C>& weights, HeadRows<T> rows, uint first,
    uint lane) {
  constexpr int V = 4;
  const Tile<U, R, C> factors = converted<U>(weights);
#pragma unroll
  for (int c = 0; c < C; ++c) {
#pragma unroll
    for (int b = 0; b < D / 8; b += V) {
      constexpr int W = pack_elements<T>;
      const uint pack = (b * 8 + tile_column(lane) * V) / W;
      T v[2 * V];
      load_part<T, W>(rows, first + c * 8 + tile_row(lane), pack, v);
#pragma unroll
      for (int t = 0; t < V; ++t) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const vec<U, 2> pair = vec<U, 2>(U(v[2 * t]), U(v[2 * t + 1]));
          sums.at[r][b + t] = multiply_tiles<U>(factors.at[r][c], pair, sums.at[r][b + t]);
        }
      }
    }
  }
}

// Rows of T at `to` from sums that add_weighted made.
template <typename T, int D, int R>
inline void store_sums(
    thread const Tile<float, R, D / 8>& sums, device T* to, uint first, uint count, float factor, uint lane) {
  constexpr int V = 4;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint row = first + r * 8 + tile_row(lane);
    if (row < count) {
#pragma unroll
      for (int b = 0; b < D / 8; b += V) {
        Tile<float, 1, V> part;
#pragma unroll
        for (int t = 0; t < V; ++t) {
          part.at[0][t] = sums.at[r][b + t] * factor;
        }
        store_dealt_pairs<T, V>(part, to + row * D + b * 8, lane);
      }
    }
  }
}

// A head's scores.
struct Scores {
  const device uchar* mask;
  int64_t mask_start;               // elements
  const device float2* statistics;  // [batch, heads, rows]: the logsumexp in the unit of scores, delta
  uint first;                       // of the head's statistics
};

template <typename T>
inline Scores scores_of(
    const device uchar* mask, const device float2* statistics, uint batch, uint head,
    thread const AttentionBackwardParams& params) {
  Scores scores;
  scores.mask = mask;
  scores.mask_start = params.mask_start + batch * params.mask_strides[0] + head * params.mask_strides[1];
  scores.statistics = statistics;
  scores.first = (batch * params.heads + head) * params.rows;
  return scores;
}

// Of the lane's places along an axis of a tile, which come in pairs if they go across: from the tile's start.
template <bool across>
inline uint tile_place(int n, uint lane) {
  return across ? n / 2 * 8 + tile_column(lane) + n % 2 : n * 8 + tile_row(lane);
}

// Applies a mask of elements M to scores: one of bools hides, another is added and hides by -inf. keys_first: the
// tile's rows are keys.
template <typename T, typename M, bool keys_first, int R, int C>
inline void apply_mask(
    thread Tile<float, R, C>& s, Scores scores, uint first_row, uint first_key, uint lane,
    thread const AttentionBackwardParams& params) {
#pragma unroll
  for (int a = 0; a < (keys_first ? 2 * C : R); ++a) {
    const uint row = min(first_row + tile_place<keys_first>(a, lane), params.rows - 1);
    const device M* own = (const device M*)(scores.mask + row * params.mask_row_bytes) + scores.mask_start;
#pragma unroll
    for (int b = 0; b < (keys_first ? R : 2 * C); ++b) {
      const uint key = min(first_key + tile_place<!keys_first>(b, lane), params.columns - 1);
      const M mask = own[int(key) * params.mask_key];
      const int r = keys_first ? b : a;
      const int i = keys_first ? a : b;
      const float score = s.at[r][i / 2][i % 2];
      if constexpr (is_same_v<M, uchar>) {
        s.at[r][i / 2][i % 2] = mask != 0 ? score : -INFINITY;
      } else {
        s.at[r][i / 2][i % 2] = float(mask) == -INFINITY ? -INFINITY : fma(float(mask), score_unit<T>(), score);
      }
    }
  }
}

// Products become scores; -inf where a row does not see a key, or one of them is not there.
template <typename T, bool keys_first, int R, int C>
inline void mask_products(
    thread Tile<float, R, C>& s, Scores scores, uint first_row, uint first_key, uint lane,
    thread const AttentionBackwardParams& params) {
  multiply(s, params.scale * score_unit<T>());
  if (params.mask == bool_mask) {
    apply_mask<T, uchar, keys_first>(s, scores, first_row, first_key, lane, params);
  } else if (params.mask == additive_mask) {
    apply_mask<T, T, keys_first>(s, scores, first_row, first_key, lane, params);
  }
#pragma unroll
  for (int a = 0; a < (keys_first ? 2 * C : R); ++a) {
    const int row = int(first_row + tile_place<keys_first>(a, lane));
    const int end = row < int(params.rows) ? min(row + params.seen_end, int(params.columns)) : 0;
#pragma unroll
    for (int b = 0; b < (keys_first ? R : 2 * C); ++b) {
      const int key = int(first_key + tile_place<!keys_first>(b, lane));
      const int r = keys_first ? b : a;
      const int i = keys_first ? a : b;
      const bool seen = (key < end) & (key >= row + params.seen_begin);
      s.at[r][i / 2][i % 2] = seen ? s.at[r][i / 2][i % 2] : -INFINITY;
    }
  }
}

// Scores become p, and products of cotangents and values ds.
template <typename T, bool keys_first, int R, int C>
inline void weigh(
    thread Tile<float, R, C>& s, thread Tile<float, R, C>& dp, Scores scores, uint first_row, uint lane,
    thread const AttentionBackwardParams& params) {
  constexpr int rows = keys_first ? 2 * C : R;
  constexpr int keys = keys_first ? R : 2 * C;
#pragma unroll
  for (int a = 0; a < rows; ++a) {
    const uint row = min(first_row + tile_place<keys_first>(a, lane), params.rows - 1);
    const float2 statistics = scores.statistics[scores.first + row];
#pragma unroll
    for (int b = 0; b < keys; ++b) {
      const int r = keys_first ? b : a;
      const int i = keys_first ? a : b;
      const float score = s.at[r][i / 2][i % 2];
      const bool seen = score != -INFINITY;  // then the logsumexp is not -inf
      const float p = seen ? softmax_weight<T>(score - statistics.x) : 0.0f;
      s.at[r][i / 2][i % 2] = p;
      dp.at[r][i / 2][i % 2] = seen ? p * (dp.at[r][i / 2][i % 2] - statistics.y) : 0.0f;
    }
  }
}

// The keys that some of `count` rows from `first` on see, by causality and window, from x to y. to_rows: the rows that
// see some of `count` keys.
inline uint2 seen_range(uint first, uint count, bool to_rows, thread const AttentionBackwardParams& params) {
  const int size = int(to_rows ? params.rows : params.columns);
  const int last = int(first + count) - 1;
  const int begin = to_rows ? int(first) + 1 - params.seen_end : int(first) + params.seen_begin;
  const int end = to_rows ? last + 1 - params.seen_begin : last + params.seen_end;
  return uint2(uint(clamp(begin, 0, size)), uint(clamp(end, 0, size)));
}

}  // namespace mittens
