// Rows of a source as left operands of products with 8 columns, whose columns meet by pairs, and transposed ones, by
// singles (mittens/tile.h).
#pragma once

#include "mittens/source.h"
#include "mittens/tile.h"

namespace mittens {

// Which elements of a run make pair t: neighbours, or elements `apart` from each other.
template <typename Source>
struct PairOrder {
  static constant constexpr int apart = 1;
};

// The column of a that row `row` of right operand n belongs to, where the runs of a have E elements.
template <int E, int apart = 1>
inline uint column_of_right(int n, uint row) {
  const int t = n % (E / 2);
  return n / (E / 2) * 4 * E + row / 2 * E + first_of_pair<apart>(t) + row % 2 * apart;
}

// The column of a that row `row` of sums n of a transposed a belongs to.
template <int E>
inline uint column_of_sum(int n, uint row) {
  return n / E * 8 * E + row * E + n % E;
}

// The place of a lane's pair of right operand n among all pairs, if its pairs of W operands lie side by side: these are
// loaded and stored at once. n: a multiple of W.
template <int W>
inline uint place_of_right(uint n, uint lane) {
  return n * 32 + lane * W;
}

template <typename U, int W>
inline void store_pairs(threadgroup vec<U, 2>* to, thread const vec<U, 2> (&pairs)[W]) {
  vec<uint, W * sizeof(U) / 2> bits;
#pragma unroll
  for (int w = 0; w < W; ++w) {
    if constexpr (sizeof(U) == 2) {
      bits[w] = as_type<uint>(pairs[w]);
    } else {
      bits[2 * w] = as_type<uint>(pairs[w].x);
      bits[2 * w + 1] = as_type<uint>(pairs[w].y);
    }
  }
  *(threadgroup vec<uint, W * sizeof(U) / 2>*)to = bits;
}

template <typename U, int W>
inline void load_pairs(threadgroup const vec<U, 2>* from, thread vec<U, 2> (&to)[W]) {
  const auto bits = *(threadgroup const vec<uint, W * sizeof(U) / 2>*)from;
#pragma unroll
  for (int w = 0; w < W; ++w) {
    if constexpr (sizeof(U) == 2) {
      to[w] = as_type<vec<U, 2>>(bits[w]);
    } else {
      to[w] = as_type<vec<U, 2>>(uint2(bits[2 * w], bits[2 * w + 1]));
    }
  }
}

// sums += a b, where a has 8 C rows of D columns from row `first` on; rows from `rows` on repeat the last one. b lies
// in memory as lanes have it, at place_of_right.
template <int D, int W = 1, typename Source, typename U, int C>
inline void multiply_from_source(
    thread Tile<float, C, 1>& sums, Source a, uint first, uint rows, threadgroup const vec<U, 2>* b, uint lane) {
  constexpr int E = Source::Values::size;
#pragma unroll
  for (int part = 0; part < D / (4 * E); ++part) {
    if constexpr (W > 1) {
      static_assert(E / 2 % W == 0, "the pairs of a run are whole loads");
      typename Source::Run runs[C];
#pragma unroll
      for (int c = 0; c < C; ++c) {
        runs[c] = a.load(min(first + c * 8 + tile_row(lane), rows - 1), part * 4 + tile_column(lane) / 2);
      }
#pragma unroll
      for (int t = 0; t < E / 2; t += W) {
        vec<U, 2> right[W];
        load_pairs(b + place_of_right<W>(part * E / 2 + t, lane), right);
#pragma unroll
        for (int w = 0; w < W; ++w) {
#pragma unroll
          for (int c = 0; c < C; ++c) {
            const vec<U, 2> pair =
                vec<U, 2>(Source::element(runs[c], 2 * (t + w)), Source::element(runs[c], 2 * (t + w) + 1));
            sums.at[c][0] = multiply_tiles<U>(pair, right[w], sums.at[c][0]);
          }
        }
      }
    } else {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const typename Source::Run run =
            a.load(min(first + c * 8 + tile_row(lane), rows - 1), part * 4 + tile_column(lane) / 2);
#pragma unroll
        for (int t = 0; t < E / 2; ++t) {
          const vec<U, 2> pair = vec<U, 2>(Source::element(run, 2 * t), Source::element(run, 2 * t + 1));
          sums.at[c][0] = multiply_tiles<U>(pair, b[(part * E / 2 + t) * 32 + lane], sums.at[c][0]);
        }
      }
    }
  }
}

// sums += a^T b, where a has 8 C rows of 8 N columns. Returns whether all elements of a are finite; if `guarded` the
// others count as 0.
template <bool guarded, typename Source, typename U, int C, int N>
inline bool multiply_transposed(
    thread Tile<float, N, 1>& sums, Source a, uint first, uint rows, thread const Tile<U, C, 1>& b, uint lane) {
  constexpr int E = Source::Values::size;
  bool finite = true;
#pragma unroll
  for (int c = 0; c < C; ++c) {
    const uint row = first + c * 8 + tile_column(lane);
#pragma unroll
    for (int part = 0; part < N / E; ++part) {
      const uint own = part * 8 + tile_row(lane);
      const typename Source::Run upper = a.load(min(row, rows - 1), own);
      const typename Source::Run lower = a.load(min(row + 1, rows - 1), own);
#pragma unroll
      for (int e = 0; e < E; ++e) {
        vec<U, 2> pair = vec<U, 2>(Source::element(upper, e), Source::element(lower, e));
        if (guarded) {
          const bool finite_upper = is_finite(pair.x);
          const bool finite_lower = is_finite(pair.y);
          pair = vec<U, 2>(finite_upper ? pair.x : U(0), finite_lower ? pair.y : U(0));
          finite = finite && finite_upper && finite_lower;
        }
        sums.at[part * E + e][0] = multiply_tiles<U>(pair, b.at[c][0], sums.at[part * E + e][0]);
      }
    }
  }
  return finite;
}

// The terms that multiply_transposed leaves out: infinite and NaN elements times weights that are not 0.
template <typename Source, typename U, int C, int N>
inline void add_not_finite(
    thread Tile<float, N, 1>& sums, Source a, uint first, uint rows, thread const Tile<U, C, 1>& b, uint lane) {
  constexpr int E = Source::Values::size;
#pragma unroll
  for (int c = 0; c < C; ++c) {
#pragma unroll 1
    for (uint row = 0; row < 8; ++row) {
      const vec<U, 2> weights = shuffled<U>(b.at[c][0], tile_lane(row, tile_column(lane)));
#pragma unroll
      for (int part = 0; part < N / E; ++part) {
        const typename Source::Run run = a.load(min(first + c * 8 + row, rows - 1), part * 8 + tile_row(lane));
#pragma unroll
        for (int e = 0; e < E; ++e) {
          const U value = U(Source::element(run, e));
          thread float2& sum = sums.at[part * E + e][0];
          sum.x = is_finite(value) || weights.x == U(0) ? sum.x : fma(float(weights.x), float(value), sum.x);
          sum.y = is_finite(value) || weights.y == U(0) ? sum.y : fma(float(weights.y), float(value), sum.y);
        }
      }
    }
  }
}

}  // namespace mittens
