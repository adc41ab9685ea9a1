// Attention of a few rows of queries that share keys and values, by products of matrices:
//
//   S^T = K Q^T,   O^T = V^T softmax(S)^T
//
// Keys and values are left operands, 8 C keys at a time, and 8 rows of queries are a right one: a lane then has scores
// of two rows, for all keys of the tile that its place stands for, and its sums are of the same two rows, so that what
// rescales them is at hand. They are rescaled only where a maximum grew by much. The transposed weights are the right
// operand of the second product as they are.
//
// Which elements of a head meet in a product is free, as long as both operands agree: a lane has E neighbours of a row,
// loaded at once, and the queries follow.
//
// How keys and values become operands is the matter of `Tiles`: PlainTiles (plain_tiles.h), PackedTiles (packed_tiles.h).
// Each has queries and sums, says whether prompts come to it, and has these functions:
//
//   load_queries   into registers or threadgroup memory
//   load_tiles     its Keys or its Values
//   clear          nothing is summed up
//   multiply_keys  scores of a tile, in the units of the weights
//   outgrow        whether sums have to be rescaled for another reason than a row's maximum
//   rescale        sums to a maximum that is raised
//   add_values     to the sums what a tile adds, whose scores are given as distances from the maximum
//   complete       sums as shares of a row's maximum, in the end
#pragma once

#include "attention/decode.h"
#include "mittens/fragment_layout.h"

namespace mittens {

// For B blocks of 8 rows of queries, heads of D elements, of which a lane loads `keys` and `values` neighbours at once.
// At D = 128 and B = 1 a lane holds 32 registers of sums, 16 of queries, and 16 each of keys and values on their way, so
// that the next keys are loaded while the values are added up (loads_ahead). With two blocks that would be more than a
// lane of an Apple GPU has: keys and values then take turns, and each is multiplied with twice as many rows. In float32
// keys and values are 32 registers each, and queries lie in threadgroup memory.
template <int D, int B, int tiles, int keys, int values, bool loads_ahead>
struct TileShape {
  static constant constexpr int C = tiles;  // of 8 keys, at a time
  static constant constexpr int tile = 8 * C;
  static constant constexpr bool ahead = loads_ahead;
  static constant constexpr int key_elements = keys;
  static constant constexpr int key_columns = 4 * keys;  // of a load of all lanes
  static constant constexpr int key_loads = D / key_columns;
  static constant constexpr int value_elements = values;
  static constant constexpr int value_columns = 8 * values;
  static constant constexpr int value_loads = D / value_columns;

  // How sums lie in threadgroup memory, so far apart that no two banks meet.
  static constant constexpr int block = 8;
  static constant constexpr int columns = D;
  static constant constexpr int sum_stride = (columns + 32) / value_elements;
  static constant constexpr int sum_row = value_elements * sum_stride + 4;
};

template <typename Tiles>
constexpr int tile_scratch() {
  return decode_simdgroups * Tiles::Shape::block * Tiles::Shape::sum_row;
}

// The column from which a lane loads; those past the width stand for the first ones: they are multiplied by 0, or dropped
// in the end.
inline uint loaded_column(uint column, uint width) {
  return column < width ? column : 0;
}

// The lane's two rows of 8 queries.
struct ScoredRows {
  ScoredRow at[2];
};

// The first tile from `first` on that one of the rows sees, if those that none sees are skipped.
template <int C, int B>
inline uint next_tile(
    uint first, uint end, bool skips, thread const ScoredRows (&rows)[B], uint lane, constant AttentionParams& params) {
  while (skips && first < end) {
    bool seen = false;
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const uint key = first + c * 8 + tile_row(lane);
#pragma unroll
      for (int b = 0; b < B; ++b) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          seen = seen || (key < end && sees(rows[b].at[i], key, params));
        }
      }
    }
    if (simd_any(seen)) {
      break;
    }
    first += decode_simdgroups * 8 * C;
  }
  return first;
}

// The lane's queries as right operands; zeros for rows and columns that are not there, or if none are wanted.
template <typename Tiles, typename T, int N, int B>
inline void load_query_pairs(
    thread Fragments<T, N> (&queries)[B], DecodeRows<T> rows, bool wanted, uint lane, constant AttentionParams& params) {
  constexpr int E = Tiles::Shape::key_elements;
#pragma unroll
  for (int b = 0; b < B; ++b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint own = b * 8 + tile_column(lane) + i;
      const device T* from = query_of(rows, own, params);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int t = n % (E / 2);
        const uint d = n / (E / 2) * Tiles::Shape::key_columns + tile_row(lane) / 2 * E +
            (tile_row(lane) % 2 == 0 ? Tiles::paired(t, 0) : Tiles::paired(t, 1));
        queries[b].at[n][i] = T(0);
        if (wanted && d < params.width && own < rows.count) {
          queries[b].at[n][i] = from[d];
        }
      }
    }
  }
}

// By how much scores may exceed what is taken off them before sums are rescaled: weights are 2^8 at most, and in a half
// type as exact as those below 1. Most tiles then need no exchange over the lanes.
constant constexpr float headroom = 8;

inline bool exceeds(float2 scores, float2 maximum) {
  return scores.x > maximum.x + headroom || scores.y > maximum.y + headroom;
}

// Whether all rows of the tiles are there, for all lanes, and aligned.
template <bool whole>
struct Whole {};

// The keys or the values of the next tiles, from `first` on; zeros where there are none.
template <typename Tiles, typename Loaded>
inline void load_next(
    thread const Tiles& own, bool aligned, uint first, uint end, uint width, uint lane, thread Loaded& to) {
  if (first + Tiles::Shape::tile <= end && aligned) {
    load_tiles(own, Whole<true>(), first, end, width, lane, to);
  } else {
    load_tiles(own, Whole<false>(), first, end, width, lane, to);
  }
}

template <typename T>
inline float2 softmax_weights(float2 differences) {
  return float2(softmax_weight<T>(differences.x), softmax_weight<T>(differences.y));
}

// Returns what is left to write_seen.
template <typename Tiles, typename T, int B>
inline uint decode_tiles(
    DecodeRows<T> rows, thread Tiles& own, constant AttentionParams& params, uint3 group, uint t, uint lane,
    uint simdgroup, threadgroup float* scratch, threadgroup float* maxima, threadgroup float* totals) {
  using Shape = typename Tiles::Shape;
  constexpr int C = Shape::C;
  const uint split = group.y;
  const uint2 range = key_range(rows, split, params);
  const uint end = range.y;
  const uint2 seen_by_all = open_range(rows, end, params);

  ScoredRows scored[B];
#pragma unroll
  for (int b = 0; b < B; ++b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scored[b].at[i] = scored_row(rows, b * 8 + tile_column(lane) + i, params);
    }
  }
  load_queries(own, rows, range.x + simdgroup * Shape::tile < end, lane, simdgroup, scratch, params);

  // Where a prompt's mask says what is seen, tiles that no row sees are skipped, unless a row sees none at all.
  for (bool skips = Tiles::prompts && params.skips;; skips = false) {
    clear(own);
    float2 maximum[B];
    float2 total[B];
#pragma unroll
    for (int b = 0; b < B; ++b) {
      maximum[b] = float2(-INFINITY);
      total[b] = float2(0.0f);
    }

    typename Tiles::Keys k;
    uint first = range.x + simdgroup * Shape::tile;
    first = next_tile<C>(first, end, skips, scored, lane, params);
    if constexpr (Shape::ahead) {
      load_next(own, own.keys.aligned, first, end, params.width, lane, k);
    }
    while (first < end) {
      if constexpr (!Shape::ahead) {
        load_next(own, own.keys.aligned, first, end, params.width, lane, k);
      }
      typename Tiles::Values v;
      if constexpr (Shape::ahead) {
        load_next(own, own.values.aligned, first, end, params.width, lane, v);
      }

      const uint next = next_tile<C>(first + decode_simdgroups * Shape::tile, end, skips, scored, lane, params);
      Tile<float, B, C> scores;  // two rows of each block, a key of each tile
      multiply_keys(own, k, scores, params);
      if constexpr (Shape::ahead) {
        load_next(own, own.keys.aligned, next, end, params.width, lane, k);
      } else {
        load_next(own, own.values.aligned, first, end, params.width, lane, v);
      }

      // Most tiles are seen by all rows.
      const bool open = first >= seen_by_all.x && first + Shape::tile <= seen_by_all.y;
      bool grew = false;
      float2 largest[B];
#pragma unroll
      for (int b = 0; b < B; ++b) {
        largest[b] = float2(-INFINITY);
#pragma unroll
        for (int c = 0; c < C; ++c) {
          if (!open) {
            const uint key = first + c * 8 + tile_row(lane);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float score = -INFINITY;
              if (key < end) {
                score = masked_score<T>(scores.at[b][c][i], key, scored[b].at[i], params);
              }
              scores.at[b][c][i] = score;
            }
          }
          largest[b] = max(largest[b], scores.at[b][c]);
        }
        grew = grew || exceeds(largest[b], maximum[b]) || outgrow(own, b, v, scores, finite_maximum(maximum[b]));
      }
      if (simd_any(grew)) {
#pragma unroll
        for (int b = 0; b < B; ++b) {
          const float2 raised = max(maximum[b], lanes_of_column_max(largest[b]));
          const float2 factor = softmax_weights<T>(maximum[b] - finite_maximum(raised));
          total[b] *= factor;
          rescale(own, b, v, scores, finite_maximum(maximum[b]), finite_maximum(raised), factor);
          maximum[b] = raised;
        }
      }

#pragma unroll
      for (int b = 0; b < B; ++b) {
        const float2 base = finite_maximum(maximum[b]);
#pragma unroll
        for (int c = 0; c < C; ++c) {
          scores.at[b][c] -= base;
          total[b] += softmax_weights<T>(scores.at[b][c]);
        }
      }
      add_values(own, v, scores);
      first = next;
    }

    // What the simdgroups have of a row, each from its own maximum, becomes one.
#pragma unroll
    for (int b = 0; b < B; ++b) {
      const float2 all = lanes_of_column_sum(total[b]);
      if (tile_row(lane) == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint row = b * 8 + tile_column(lane) + i;
          maxima[row * decode_simdgroups + simdgroup] = maximum[b][i];
          totals[row * decode_simdgroups + simdgroup] = all[i];
        }
      }
    }
    if (!skips) {
      break;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    bool unseeing = false;
    if (lane < 8 * B) {
      unseeing = true;
#pragma unroll
      for (int s = 0; s < decode_simdgroups; ++s) {
        unseeing = unseeing && maxima[lane * decode_simdgroups + s] <= hidden_score(params);
      }
    }
    if (!simd_any(unseeing)) {
      break;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  complete(own);

  place_rows(rows, found_anew(group, params), 8 * B, params);
  uint left = 0;
#pragma unroll
  for (int b = 0; b < B; ++b) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int n = 0; n < Shape::value_loads; ++n) {
#pragma unroll
      for (int e = 0; e < Shape::value_elements; ++e) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          scratch[(simdgroup * Shape::block + tile_column(lane) + i) * Shape::sum_row + e * Shape::sum_stride + n * 8 +
                  tile_row(lane)] = own.sums.at[b][n * Shape::value_elements + e][i];
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    left |= write_rows<Shape, Shape::value_elements>(rows, params, split, t, b * Shape::block, scratch, maxima, totals);
  }
  return left;
}

}  // namespace mittens
