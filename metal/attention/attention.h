// Attention, transposed, of 8 rows of queries that share keys and values:
//
//   S = K Q^T,   P = exp(S - m),   O = V^T P,   y = (O / l)^T,   m: maximum of S's columns, l: sum of P's
//
// Transposed, K and V are left operands in the order of memory, and P is a right operand without a shuffle. A lane
// holds the same two neighbouring rows of queries throughout.
//
// The rows that share keys are the heads of a group times the queries. In decoding (Phase::decode) the simdgroups of a
// threadgroup have the same 8 rows and share out their keys; in prompts (Phase::prompt) each has rows of its own.
#pragma once

#include "attention/mask.h"
#include "mittens/fragment_layout.h"
#include "mittens/instantiate.h"
#include "mittens/online_softmax.h"
#include "mittens/operand.h"

namespace mittens {

enum class Phase { decode, prompt };

// How many simdgroups a threadgroup has, for heads of this width.
template <Phase phase>
constexpr int attention_simdgroups(int width) {
  return phase == Phase::decode ? kDecodeSimdgroups : attention_prompt_simdgroups(width);
}

// Sizes that a kernel is compiled for. Keys have D elements, values DV.
template <typename Type, int D, int DV, Phase served>
struct AttentionShape {
  using T = Type;
  using Operand = typename OperandOf<T>::type;
  static constant constexpr Phase phase = served;
  static constant constexpr int simdgroups = attention_simdgroups<phase>(D);
  static constant constexpr int slices = attention_value_slices(DV);
  static constant constexpr int columns = DV / slices;  // of the values
  static constant constexpr int width = D;
  // Decoding on an Apple GPU takes one block of keys at a time: fewer registers let a core hold more threads.
  static constant constexpr int key_blocks =
      phase == Phase::decode && !is_nvidia ? 1 : attention_key_blocks(DV, is_same_v<T, half>);
  // How many right operands one load fetches: several in prompts on Apple GPUs, unless heads are too wide.
  static constant constexpr int at_once =
      phase == Phase::decode || is_nvidia || D > 128 ? 1 : run_size(D / 8, 1, 16 / sizeof(vec<Operand, 2>));
  // Threadgroup memory, in float4. It holds the queries as right operands; in prompts each simdgroup has its own. In
  // decoding it holds the sums that simdgroups merge, once all keys are read.
  static constant constexpr int queries = D * kQueryRows * sizeof(Operand) / 16;
  static constant constexpr int all_queries = phase == Phase::prompt ? simdgroups * queries : queries;
  static constant constexpr int sums = phase == Phase::prompt ? 0 : (columns / 8 + 2) * 32 / 2;
  static constant constexpr int scratch = all_queries > sums ? all_queries : sums;
};

template <typename Shape>
inline AttentionPlace place_of(
    uint3 group, uint lane, uint simdgroup, uint simdgroups, constant AttentionParams& params) {
  const uint block = Shape::phase == Phase::decode ? group.x : group.x * simdgroups + simdgroup;
  return AttentionPlace{
      group.z / params.key_heads,
      group.z % params.key_heads,
      group.y / Shape::slices,
      group.y % Shape::slices,
      block * kQueryRows,
      params.ratio * params.queries,
      lane,
      simdgroup,
      simdgroups};
}

// Copies this lane's elements of 8 rows of queries to threadgroup memory, as right operands, in the order of keys,
// which are loaded in runs of E elements. Rows past the last one are zeros.
template <int D, int E, int apart = 1, int W = 1, typename T, typename U>
inline void stage_queries(
    threadgroup vec<U, 2>* to, const device T* queries, AttentionPlace place, uint first_part, uint parts,
    constant AttentionParams& params) {
  const uint own = place.first + tile_column(place.lane);
  const device T* rows[2];
#pragma unroll
  for (uint i = 0; i < 2; ++i) {
    const uint row = min(own + i, place.rows - 1);
    rows[i] = TokenRows::at(
        queries, params.query, place.batch, place.key_head * params.ratio + row / params.queries, row % params.queries);
  }
  if constexpr (W > 1) {
    for (uint n = first_part * W; n < D / 8; n += parts * W) {
      vec<U, 2> pairs[W];
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const uint column = column_of_right<E, apart>(n + w, tile_row(place.lane));
        pairs[w].x = own < place.rows ? U(rows[0][column]) : U(0);
        pairs[w].y = own + 1 < place.rows ? U(rows[1][column]) : U(0);
      }
      store_pairs(to + place_of_right<W>(n, place.lane), pairs);
    }
    return;
  }
  for (uint n = first_part; n < D / 8; n += parts) {
    const uint column = column_of_right<E, apart>(n, tile_row(place.lane));
    vec<U, 2> pair = vec<U, 2>(U(0), U(0));
    pair.x = own < place.rows ? U(rows[0][column]) : pair.x;
    pair.y = own + 1 < place.rows ? U(rows[1][column]) : pair.y;
    to[n * 32 + place.lane] = pair;
  }
}

// Merges the results of all simdgroups for the same rows: each hands its own to the next. The last one has the total.
template <typename T, int N>
inline void merge_simdgroups(
    thread Tile<float, N, 1>& sums, thread OnlineSoftmax<T>& softmax, threadgroup float2* scratch,
    AttentionPlace place) {
  for (uint s = 0; s + 1 < place.simdgroups; ++s) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (place.simdgroup == s) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        scratch[n * 32 + place.lane] = sums.at[n][0];
      }
      scratch[N * 32 + place.lane] = softmax.m;
      scratch[(N + 1) * 32 + place.lane] = softmax.l;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (place.simdgroup == s + 1) {
      const float2 other = scratch[N * 32 + place.lane];
      const float2 m = max(softmax.m, other);
      const float2 own_decay = softmax_weights<T>(softmax.m - finite_maximum(m));
      const float2 decay = softmax_weights<T>(other - finite_maximum(m));
      softmax.m = m;
      softmax.l = softmax.l * own_decay + scratch[(N + 1) * 32 + place.lane] * decay;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        sums.at[n][0] = sums.at[n][0] * own_decay + scratch[n * 32 + place.lane] * decay;
      }
    }
  }
}

// Writes y = O / l. If several threadgroups share the keys of a row, writes O, m and l for attention_combine.metal.
template <int E, typename T, int N>
inline void write_rows(
    thread const Tile<float, N, 1>& sums, OnlineSoftmax<T> softmax, device T* y, device float* logsumexp,
    threadgroup const AttentionRow* rows, AttentionPlace place, constant AttentionParams& params) {
  const float2 l = lanes_of_column_sum(softmax.l);
  const size_t all_rows = size_t(params.batches) * params.key_heads * params.ratio * params.queries;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    threadgroup const AttentionRow& own = rows[tile_column(place.lane) + i];
    const size_t row = own.result;
    if (row == no_row) {
      continue;
    }
    const float m = seen_maximum(softmax.m[i], own, params);
    const float factor = params.splits > 1 ? 1.0f : inverse_sum(m, l[i]);
    device float* partials = (device float*)y;
#pragma unroll
    for (int part = 0; part < N / E; ++part) {
      const uint column = place.slice * N * 8 + column_of_sum<E>(part * E, tile_row(place.lane));
      if (column < params.value_width) {
        float values[E];
#pragma unroll
        for (int e = 0; e < E; ++e) {
          values[e] = sums.at[part * E + e][0][i] * factor;
        }
        if (params.splits == 1) {
          store_neighbours<T, E>(y + row * params.value_width + column, values);
        } else {
          store_neighbours<float, E>(partials + (place.split * all_rows + row) * params.value_width + column, values);
        }
      }
    }
    if (tile_row(place.lane) == 0 && place.slice == 0) {
      if (params.splits > 1) {
        device float* of_row =
            partials + params.splits * all_rows * params.value_width + row * params.splits + place.split;
        of_row[0] = m;
        of_row[all_rows * params.splits] = l[i];
      } else if (params.has_logsumexp) {
        logsumexp[row] = logsumexp_of<T>(m, l[i]);
      }
    }
  }
}

// `limits` says which keys a row of the batch has: EveryKey, or RowKeys (ragged.h). `blocks` says where they lie:
// WholeRows, or BlockTable (paged.h).
template <typename Shape, typename T, typename KeyRows, typename ValueRows, typename Limits, typename Blocks>
inline void attention(
    const device T* queries, KeyRows keys, ValueRows values, const device T* mask, const device T* sinks, device T* y,
    device float* logsumexp, Limits limits, Blocks blocks, constant AttentionParams& params, AttentionPlace place,
    threadgroup float4* scratch, threadgroup AttentionRow* rows) {
  using Operand = typename Shape::Operand;
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
  stage_queries<Shape::width, KeyRows::Values::size, 1, Shape::at_once>(q, queries, place, worker, workers, params);
  rows += place.simdgroup * kQueryRows;
  const KeyRange range = find_rows<kQueryRows>(rows, place, limits, params, step);
  shares_keys ? threadgroup_barrier(mem_flags::mem_threadgroup) : simdgroup_barrier(mem_flags::mem_threadgroup);

  Tile<float, N, 1> sums;
  fill(sums, 0.0f);
  OnlineSoftmax<T> softmax = first_state<T>(sinks, place, params, worker);
  limits.refuse(softmax, place, params, worker);  // NaN for rows whose limits are no places of keys
  blocks.seek(range.begin + worker * keys_at_once);
#pragma unroll 1
  for (uint key = range.begin + worker * keys_at_once; key < range.end; key += step) {
    simdgroup_barrier(mem_flags::mem_threadgroup);  // keeps the compiler from holding the queries in registers
    const auto block = blocks.take(key, step);
    const bool all_seen = key >= range.seen_by_all_begin && key + keys_at_once <= range.seen_by_all_end;
    const uint hidden = all_seen ? 0 : hidden_keys<C>(key, rows, mask, params, place.lane);
    if (simd_all(hidden == all_hidden<C>())) {
      continue;
    }
    if constexpr (Blocks::may_lack) {
      if (!block.is_in_pool) {
        softmax.l += nan_where_seen<C>(hidden);
        continue;
      }
    }
    const thread auto& own_keys = rows_in(block, keys);
    const thread auto& own_values = rows_in(block, values);
    Tile<float, C, 1> scores;
    fill(scores, 0.0f);
    multiply_from_source<Shape::width, Shape::at_once>(scores, own_keys, key, limits.end(params), q, place.lane);
    multiply(scores, params.scale);
    if (!all_seen) {
      mask_scores(scores, hidden, key, rows, mask, params, place.lane);
    }
    softmax.update(scores, sums);
    const Tile<Operand, C, 1> weights = converted<Operand>(scores);
    // 0 times infinity is NaN: a hidden key could spoil the sum. The second product takes values that are not finite as
    // 0, and add_not_finite adds them for keys whose weight is not 0.
    if (all_seen) {
      multiply_transposed<false>(sums, own_values, key, limits.end(params), weights, place.lane);
    } else if (!simd_all(multiply_transposed<true>(sums, own_values, key, limits.end(params), weights, place.lane))) {
      add_not_finite(sums, own_values, key, limits.end(params), weights, place.lane);
    }
  }
  if (shares_keys) {
    merge_simdgroups(sums, softmax, (threadgroup float2*)scratch, place);
  }
  if (!shares_keys || place.simdgroup + 1 == place.simdgroups) {
    write_rows<ValueRows::Values::size>(sums, softmax, y, logsumexp, rows, place, params);
  }
}

}  // namespace mittens
