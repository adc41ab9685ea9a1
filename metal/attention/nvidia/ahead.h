// Attention by simdgroups that load ahead: values before the scores, and the next keys before the values are added up.
// Each has B blocks of 8 rows of queries, which a key is multiplied with when it is loaded once. It is the algebra of
// attention/attention.h, for NVIDIA GPUs: Apple's have no registers for loads ahead.
#pragma once

#include "attention/attention.h"

namespace mittens {

// For heads of D elements, and values as wide. B, C: blocks of 8 rows of queries and of 8 keys at a time.
template <typename Type, int D, Phase served, int B, int C>
struct AheadShape {
  using T = Type;
  using Operand = T;
  static constant constexpr Phase phase = served;
  static constant constexpr int simdgroups = attention_simdgroups<phase>(D);
  static constant constexpr int slices = 1;
  static constant constexpr int columns = D;  // of the values
  static constant constexpr int width = D;
  static constant constexpr int blocks = B;
  static constant constexpr int rows = B * kQueryRows;
  static constant constexpr int key_blocks = C;
  static_assert(attention_key_blocks_ahead % C == 0, "plans count steps of so many keys");
  // Threadgroup memory, as of AttentionShape.
  static constant constexpr int queries = D * rows * sizeof(Operand) / 16;
  static constant constexpr int all_queries = phase == Phase::prompt ? simdgroups * queries : queries;
  static constant constexpr int sums = phase == Phase::prompt ? 0 : (columns / 8 + 2) * 32 / 2;
  static constant constexpr int scratch = all_queries > sums ? all_queries : sums;
};

// Pair t of a run, and element e of the runs of two rows, as operands.
template <typename U, typename Source>
inline vec<U, 2> pair_of_row(Source, typename Source::Run run, int t) {
  return vec<U, 2>(U(Source::element(run, 2 * t)), U(Source::element(run, 2 * t + 1)));
}

template <typename U, typename Source>
inline vec<U, 2> pair_of_rows(Source, typename Source::Run upper, typename Source::Run lower, int e) {
  return vec<U, 2>(U(Source::element(upper, e)), U(Source::element(lower, e)));
}

// Runs of 8 C rows of D columns that are on their way: the lane's, as multiply_from_source takes them.
template <int D, typename Source, int C>
struct LoadedRows {
  typename Source::Run at[C][D / (4 * Source::Values::size)];
};

template <int D, typename Source, int C>
inline void load_rows(thread LoadedRows<D, Source, C>& to, Source a, uint first, uint rows, uint lane) {
#pragma unroll
  for (int c = 0; c < C; ++c) {
#pragma unroll
    for (int part = 0; part < D / (4 * Source::Values::size); ++part) {
      to.at[c][part] = a.load(min(first + c * 8 + tile_row(lane), rows - 1), part * 4 + tile_column(lane) / 2);
    }
  }
}

// The same of B right operands that lie one after the other.
template <int D, typename Source, typename U, int C, int B>
inline void multiply_loaded(
    thread Tile<float, C, 1> (&sums)[B], Source a, thread const LoadedRows<D, Source, C>& loaded,
    threadgroup const vec<U, 2>* b, uint lane) {
  constexpr int E = Source::Values::size;
#pragma unroll
  for (int part = 0; part < D / (4 * E); ++part) {
#pragma unroll
    for (int t = 0; t < E / 2; ++t) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const typename Source::Run run = loaded.at[c][part];
        const vec<U, 2> pair = pair_of_row<U>(a, run, t);
#pragma unroll
        for (int i = 0; i < B; ++i) {
          sums[i].at[c][0] = multiply_tiles<U>(pair, b[(i * (D / 8) + part * E / 2 + t) * 32 + lane], sums[i].at[c][0]);
        }
      }
    }
  }
}

// The same as multiply_transposed takes them, of 8 C rows of 8 N columns.
template <int N, typename Source, int C>
struct LoadedColumns {
  typename Source::Run at[C][N / Source::Values::size][2];
};

template <int N, typename Source, int C>
inline void load_columns(thread LoadedColumns<N, Source, C>& to, Source a, uint first, uint rows, uint lane) {
#pragma unroll
  for (int c = 0; c < C; ++c) {
    const uint row = first + c * 8 + tile_column(lane);
#pragma unroll
    for (int part = 0; part < N / Source::Values::size; ++part) {
      const uint own = part * 8 + tile_row(lane);
      to.at[c][part][0] = a.load(min(row, rows - 1), own);
      to.at[c][part][1] = a.load(min(row + 1, rows - 1), own);
    }
  }
}

template <bool guarded, typename Source, typename U, int C, int N, int B>
inline bool multiply_loaded_transposed(
    thread Tile<float, N, 1> (&sums)[B], Source a, thread const LoadedColumns<N, Source, C>& loaded,
    thread const Tile<U, C, 1> (&b)[B]) {
  constexpr int E = Source::Values::size;
  bool finite = true;
#pragma unroll
  for (int part = 0; part < N / E; ++part) {
#pragma unroll
    for (int e = 0; e < E; ++e) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        vec<U, 2> pair = pair_of_rows<U>(a, loaded.at[c][part][0], loaded.at[c][part][1], e);
        if (guarded) {
          const bool finite_upper = is_finite(pair.x);
          const bool finite_lower = is_finite(pair.y);
          pair = vec<U, 2>(finite_upper ? pair.x : U(0), finite_lower ? pair.y : U(0));
          finite = finite && finite_upper && finite_lower;
        }
#pragma unroll
        for (int i = 0; i < B; ++i) {
          sums[i].at[part * E + e][0] = multiply_tiles<U>(pair, b[i].at[c][0], sums[i].at[part * E + e][0]);
        }
      }
    }
  }
  return finite;
}

template <typename Shape>
inline AttentionPlace place_ahead(
    uint3 group, uint lane, uint simdgroup, uint simdgroups, constant AttentionParams& params) {
  AttentionPlace place = place_of<Shape>(group, lane, simdgroup, simdgroups, params);
  place.first *= Shape::blocks;
  return place;
}

// A block of 8 of the rows.
inline AttentionPlace block_of(AttentionPlace place, int b) {
  place.first += b * kQueryRows;
  return place;
}

// The first keys from `key` on that a row sees, as far as an array's mask says.
template <int B, int C, typename T>
inline uint next_seen(
    uint key, uint step, KeyRange range, threadgroup const AttentionRow* rows, const device T* mask,
    constant AttentionParams& params, uint lane) {
#pragma unroll 1
  for (; params.mask_kind != no_mask && key < range.end; key += step) {
    bool sees_none = true;
#pragma unroll
    for (int b = 0; b < B; ++b) {
      sees_none = sees_none && hidden_keys<C>(key, rows + b * kQueryRows, mask, params, lane) == all_hidden<C>();
    }
    if (!simd_all(sees_none)) {
      break;
    }
  }
  return key;
}

// Keys that come next, if there are any.
template <int D, typename Keys, int C>
inline void load_next(
    thread LoadedRows<D, Keys, C>& to, Keys keys, uint key, KeyRange range, constant AttentionParams& params,
    AttentionPlace place) {
  if (key < range.end) {
    load_rows(to, keys, key, params.keys, place.lane);
  }
}

template <typename Shape, typename T, typename KeyRows, typename ValueRows>
inline void attention_ahead(
    const device T* queries, KeyRows keys, ValueRows values, const device T* mask, const device T* sinks, device T* y,
    device float* logsumexp, constant AttentionParams& params, AttentionPlace place, threadgroup float4* scratch,
    threadgroup AttentionRow* rows) {
  using Operand = typename Shape::Operand;
  constexpr int B = Shape::blocks;
  constexpr int C = Shape::key_blocks;
  constexpr int N = Shape::columns / 8;
  constexpr bool shares_keys = Shape::phase == Phase::decode;
  if (!shares_keys && place.first >= place.rows) {
    return;
  }
  const uint workers = shares_keys ? place.simdgroups : 1;
  const uint worker = shares_keys ? place.simdgroup : 0;
  constexpr uint keys_at_once = kKeyRows * C;
  const uint step = workers * keys_at_once;
  threadgroup vec<Operand, 2>* q =
      (threadgroup vec<Operand, 2>*)(scratch + (shares_keys ? 0 : place.simdgroup * Shape::queries));
#pragma unroll
  for (int b = 0; b < B; ++b) {
    stage_queries<Shape::width, KeyRows::Values::size, PairOrder<KeyRows>::apart>(
        q + b * (Shape::width / 8) * 32, queries, block_of(place, b), worker, workers, params);
  }
  rows += place.simdgroup * Shape::rows;
  const KeyRange range = find_rows<Shape::rows>(rows, place, EveryKey(), params, step);
  shares_keys ? threadgroup_barrier(mem_flags::mem_threadgroup) : simdgroup_barrier(mem_flags::mem_threadgroup);

  Tile<float, N, 1> sums[B];
  OnlineSoftmax<T> softmax[B];
#pragma unroll
  for (int b = 0; b < B; ++b) {
    fill(sums[b], 0.0f);
    softmax[b] = first_state<T>(sinks, block_of(place, b), params, worker);
  }
  uint key = next_seen<B, C>(range.begin + worker * keys_at_once, step, range, rows, mask, params, place.lane);
  LoadedRows<Shape::width, KeyRows, C> next_keys;
  load_next<Shape::width>(next_keys, keys, key, range, params, place);
#pragma unroll 1
  while (key < range.end) {
    simdgroup_barrier(mem_flags::mem_threadgroup);  // queries are read anew, not kept in registers
    const bool all_seen = key >= range.seen_by_all_begin && key + keys_at_once <= range.seen_by_all_end;
    const uint next = next_seen<B, C>(key + step, step, range, rows, mask, params, place.lane);
    Tile<float, C, 1> scores[B];
#pragma unroll
    for (int b = 0; b < B; ++b) {
      fill(scores[b], 0.0f);
    }
    LoadedColumns<N, ValueRows, C> own_values;
    load_columns(own_values, values, key, params.keys, place.lane);
    multiply_loaded<Shape::width>(scores, keys, next_keys, q, place.lane);
    load_next<Shape::width>(next_keys, keys, next, range, params, place);
    Tile<Operand, C, 1> weights[B];
#pragma unroll
    for (int b = 0; b < B; ++b) {
      multiply(scores[b], params.scale);
      if (!all_seen) {
        const uint hidden = hidden_keys<C>(key, rows + b * kQueryRows, mask, params, place.lane);
        mask_scores(scores[b], hidden, key, rows + b * kQueryRows, mask, params, place.lane);
      }
      softmax[b].update(scores[b], sums[b]);
      weights[b] = converted<Operand>(scores[b]);
    }
    // A weight of 0 times infinity is NaN: where values are not all finite, hidden keys are left out.
    if (all_seen) {
      multiply_loaded_transposed<false>(sums, values, own_values, weights);
    } else if (!simd_all(multiply_loaded_transposed<true>(sums, values, own_values, weights))) {
#pragma unroll
      for (int b = 0; b < B; ++b) {
        add_not_finite(sums[b], values, key, params.keys, weights[b], place.lane);
      }
    }
    key = next;
  }
#pragma unroll
  for (int b = 0; b < B; ++b) {
    if (shares_keys) {
      merge_simdgroups(sums[b], softmax[b], (threadgroup float2*)scratch, place);
    }
    if (!shares_keys || place.simdgroup + 1 == place.simdgroups) {
      write_rows<ValueRows::Values::size>(sums[b], softmax[b], y, logsumexp, rows + b * kQueryRows, place, params);
    }
  }
}

}  // namespace mittens
