// Gradients of attention, from its output y, the output's gradient dy and the logsumexp of each row of scores:
//
//   p = exp(scale * q k^T + mask - logsumexp)     delta = sum(dy * y)     ds = p * (dy v^T - delta)
//   dq = scale ds k     dk = scale ds^T q     dv = p^T dy     dmask = ds     dsinks = -sum(exp(sinks - logsumexp) delta)
//
// q, dq, y, dy [batch, heads, rows, D]; k, dk, v, dv [batch, key_heads, columns, D]. Scores and weights are never all
// there: each kernel computes them again, block by block.
//
//   statistics a simdgroup takes a row, and writes its logsumexp and delta
//   finite     a simdgroup copies a row
//   dq         a simdgroup takes 8 rows along the keys that they see
//   dkv        a simdgroup takes 8 keys along the rows that see them, of one head of their group after the other;
//              heads 256 wide have one pass for dk and one for dv, whose sums do not fit the registers together
//   dmask      a simdgroup takes 8 rows and 32 keys of the mask along all that it is broadcast to
//   dsinks     a threadgroup takes a head
//
// A kernel copies its parameters before its first branch: Apple GPUs then keep them in registers that all threads
// share.
//
// Nothing is staged and nobody waits; a sum belongs to one simdgroup, so that its order is always the same. Heads of
// other widths than 64, 128 and 256 come padded with zeros. ds, which may overflow float16, stays in float32.
//
// Hidden weights are exactly 0. Where some may be hidden, sums are of copies of keys and queries with 0 in place of
// infinity and NaN: a row that sees such a key gets NaN from its score.
#include <metal_stdlib>

#include "attention/attention_backward.h"
#include "mittens/instantiate.h"
#include "mittens/reduce.h"

using namespace metal;
using namespace mittens;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_statistics(
    const device T* y [[buffer(0)]], const device T* dy [[buffer(1)]],
    const device float* logsumexp [[buffer(2)]],  // [batch, heads, rows]
    device float2* statistics [[buffer(3)]],      // [batch, heads, rows]: the logsumexp as scores are, delta
    constant AttentionBackwardParams& parameters [[buffer(4)]], lane_of_simdgroup) {
  const AttentionBackwardParams params = parameters;
  const uint row = group.x * kBackwardSimdgroups + simdgroup;
  if (row >= params.rows) {
    return;
  }
  const HeadRows<T> a = head_rows(y, params.y, group.z, group.y, params.rows);
  const HeadRows<T> b = head_rows(dy, params.dy, group.z, group.y, params.rows);
  constexpr int W = pack_elements<T>;
  float sum = 0;
  for (uint pack = lane; pack < params.width / W; pack += 32) {
    T v[W];
    T w[W];
    load_part<T, W>(a, row, pack, v);
    load_part<T, W>(b, row, pack, w);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      sum = fma(float(v[i]), float(w[i]), sum);
    }
  }
  sum = simd_sum(sum);
  if (lane == 0) {
    const size_t place = (size_t(group.z) * params.heads + group.y) * params.rows + row;
    statistics[place] = float2(logsumexp[place] * score_unit<T>(), sum);
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_finite(
    const device T* from [[buffer(0)]],
    device T* to [[buffer(1)]],  // [batch, heads, rows, width]
    constant TokenRows& source [[buffer(2)]],
    constant uint2& size [[buffer(3)]],  // rows, packs of a row
    uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int W = pack_elements<T>;
  const uint row = group.x * kBackwardSimdgroups + simdgroup;
  const TokenRows view = source;
  const HeadRows<T> rows = head_rows(from, view, group.z, group.y, size.x);
  for (uint pack = lane; row < size.x && pack < size.y; pack += 32) {
    T v[W];
    float finite[W];
    load_part<T, W>(rows, row, pack, v);
#pragma unroll
    for (int i = 0; i < W; ++i) {  // not by arithmetic, which a compiler may take to have neither NaN nor infinity
      finite[i] = (as_type<uint>(float(v[i])) & 0x7f800000u) != 0x7f800000u ? float(v[i]) : 0.0f;
    }
    const size_t place = (size_t(group.z) * groups.y + group.y) * size.x + row;
    store_neighbours<T, W>(to + (place * size.y + pack) * W, finite);
  }
}

template <typename T, int D, int C>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_dq(
    const device T* q [[buffer(0)]], const device T* k [[buffer(1)]], const device T* v [[buffer(2)]],
    const device T* dy [[buffer(3)]],
    const device uchar* mask [[buffer(4)]],         // of bools, or of T
    const device float2* statistics [[buffer(5)]],  // [batch, heads, rows]
    const device T* finite_k [[buffer(6)]], device T* dq [[buffer(7)]],
    constant AttentionBackwardParams& parameters [[buffer(8)]], uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  const AttentionBackwardParams params = parameters;
  // The last rows, which see the most if causal, start first.
  const uint first = ((groups.x - 1 - group.x) * kBackwardSimdgroups + simdgroup) * kQueryRows;
  if (first >= params.rows) {
    return;
  }
  const uint key_head = group.y / params.ratio;
  const HeadRows<T> queries = head_rows(q, params.queries, group.z, group.y, params.rows);
  const HeadRows<T> keys = head_rows(k, params.keys, group.z, key_head, params.columns);
  const HeadRows<T> finite_keys = head_rows(finite_k, params.finite_keys, group.z, key_head, params.columns);
  const HeadRows<T> values = head_rows(v, params.values, group.z, key_head, params.columns);
  const HeadRows<T> cotangents = head_rows(dy, params.dy, group.z, group.y, params.rows);
  const Scores scores = scores_of<T>(mask, statistics, group.z, group.y, params);
  const uint2 range = seen_range(first, 8, false, params);
  Tile<float, 1, D / 8> sums;
  fill(sums, 0.0f);
#pragma unroll 1
  for (uint key = range.x; key < range.y; key += 8 * C) {
    Tile<float, 1, C> s;
    Tile<float, 1, C> dp;
    multiply_fetched<T, D>(s, queries, first, keys, key, lane);
    mask_products<T, false>(s, scores, first, key, lane, params);
    multiply_fetched<T, D>(dp, cotangents, first, values, key, lane);
    weigh<T, false>(s, dp, scores, first, lane, params);
    add_weighted<ScoreType<T>, T, D>(sums, dp, finite_keys, key, lane);
  }
  device T* to = dq + (size_t(group.z) * params.heads + group.y) * params.rows * D;
  store_sums<T, D>(sums, to, first, params.rows, params.scale, lane);
}

template <typename T, int D, int C, bool for_keys, bool for_values>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_dkv(
    const device T* q [[buffer(0)]], const device T* k [[buffer(1)]], const device T* v [[buffer(2)]],
    const device T* dy [[buffer(3)]],
    const device uchar* mask [[buffer(4)]],         // of bools, or of T
    const device float2* statistics [[buffer(5)]],  // [batch, heads, rows]
    const device T* finite_q [[buffer(6)]], device T* dk [[buffer(7)]], device T* dv [[buffer(8)]],
    constant AttentionBackwardParams& parameters [[buffer(9)]], lane_of_simdgroup) {
  const AttentionBackwardParams params = parameters;
  const uint first = (group.x * kBackwardSimdgroups + simdgroup) * kKeyRows;
  if (first >= params.columns) {
    return;
  }
  const HeadRows<T> keys = head_rows(k, params.keys, group.z, group.y, params.columns);
  const HeadRows<T> values = head_rows(v, params.values, group.z, group.y, params.columns);
  const uint2 range = seen_range(first, 8, true, params);
  Tile<float, 1, D / 8> key_sums;
  Tile<float, 1, D / 8> value_sums;
  fill(key_sums, 0.0f);
  fill(value_sums, 0.0f);
#pragma unroll 1
  for (uint head = group.y * params.ratio; head < (group.y + 1) * params.ratio; ++head) {
    const HeadRows<T> queries = head_rows(q, params.queries, group.z, head, params.rows);
    const HeadRows<T> finite_queries = head_rows(finite_q, params.finite_queries, group.z, head, params.rows);
    const HeadRows<T> cotangents = head_rows(dy, params.dy, group.z, head, params.rows);
    const Scores scores = scores_of<T>(mask, statistics, group.z, head, params);
#pragma unroll 1
    for (uint row = range.x; row < range.y; row += 8 * C) {
      Tile<float, 1, C> s;
      Tile<float, 1, C> dp;
      multiply_fetched<T, D>(s, keys, first, queries, row, lane);
      mask_products<T, true>(s, scores, row, first, lane, params);
      fill(dp, 0.0f);
      if (for_keys) {
        multiply_fetched<T, D>(dp, values, first, cotangents, row, lane);
      }
      weigh<T, true>(s, dp, scores, row, lane, params);
      if (for_values) {
        add_weighted<T, T, D>(value_sums, s, cotangents, row, lane);
      }
      if (for_keys) {
        add_weighted<ScoreType<T>, T, D>(key_sums, dp, finite_queries, row, lane);
      }
    }
  }
  const size_t place = (size_t(group.z) * params.key_heads + group.y) * params.columns;
  if (for_keys) {
    store_sums<T, D>(key_sums, dk + place * D, first, params.columns, params.scale, lane);
  }
  if (for_values) {
    store_sums<T, D>(value_sums, dv + place * D, first, params.columns, 1.0f, lane);
  }
}

template <typename T, int D>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_dmask(
    const device T* q [[buffer(0)]], const device T* k [[buffer(1)]], const device T* v [[buffer(2)]],
    const device T* dy [[buffer(3)]],
    const device uchar* mask [[buffer(4)]],         // of T
    const device float2* statistics [[buffer(5)]],  // [batch, heads, rows]
    device T* dmask [[buffer(6)]],                  // params.mask_sizes
    constant AttentionBackwardParams& parameters [[buffer(7)]], lane_of_simdgroup) {
  const AttentionBackwardParams params = parameters;
  constexpr int C = kMaskBlocks;
  thread const uint32_t* sizes = params.mask_sizes;
  const uint2 batches = sizes[0] == 1 ? uint2(0, params.batches) : uint2(group.z / sizes[1], group.z / sizes[1] + 1);
  const uint2 heads = sizes[1] == 1 ? uint2(0, params.heads) : uint2(group.z % sizes[1], group.z % sizes[1] + 1);
  const uint first_row = group.y * kQueryRows;
  const uint first_key = (group.x * kBackwardSimdgroups + simdgroup) * kKeyRows * C;
  if (first_key >= sizes[3]) {
    return;
  }
  const uint end_row = sizes[2] == 1 ? params.rows : first_row + kQueryRows;
  const uint end_key = sizes[3] == 1 ? params.columns : first_key + kKeyRows * C;
  Tile<float, 1, C> sums;
  fill(sums, 0.0f);
#pragma unroll 1
  for (uint i = 0; i < (batches.y - batches.x) * (heads.y - heads.x); ++i) {
    const uint batch = batches.x + i / (heads.y - heads.x);
    const uint head = heads.x + i % (heads.y - heads.x);
    const uint key_head = head / params.ratio;
    const HeadRows<T> queries = head_rows(q, params.queries, batch, head, params.rows);
    const HeadRows<T> keys = head_rows(k, params.keys, batch, key_head, params.columns);
    const HeadRows<T> values = head_rows(v, params.values, batch, key_head, params.columns);
    const HeadRows<T> cotangents = head_rows(dy, params.dy, batch, head, params.rows);
    const Scores scores = scores_of<T>(mask, statistics, batch, head, params);
#pragma unroll 1
    for (uint row = first_row; row < end_row; row += 8) {
      const uint2 range = seen_range(row, 8, false, params);
#pragma unroll 1
      for (uint key = first_key; key < min(end_key, range.y); key += 8 * C) {
        if (key + 8 * C > range.x) {
          Tile<float, 1, C> s;
          Tile<float, 1, C> dp;
          multiply_fetched<T, D>(s, queries, row, keys, key, lane);
          mask_products<T, false>(s, scores, row, key, lane, params);
          multiply_fetched<T, D>(dp, cotangents, row, values, key, lane);
          weigh<T, false>(s, dp, scores, row, lane, params);
          add(sums, dp);
        }
      }
    }
  }
  if (sizes[3] == 1) {
    RowValues<1> all;
    fill(all, 0.0f);
    row_sum(sums, all);
    sums.at[0][0] = float2(all.at[0], 0);
  }
#pragma unroll
  for (int c = 0; c < C; ++c) {
    const float2 values = sizes[2] == 1 ? lanes_of_column_sum(sums.at[0][c]) : sums.at[0][c];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint row = first_row + tile_row(lane);
      const uint key = first_key + c * 8 + tile_column(lane) + i;
      if (row < sizes[2] && key < sizes[3]) {
        dmask[(size_t(group.z) * sizes[2] + row) * sizes[3] + key] = T(values[i]);
      }
    }
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void attention_dsinks(
    const device T* sinks [[buffer(0)]],
    const device float* logsumexp [[buffer(1)]],    // [batch, heads, rows]
    const device float2* statistics [[buffer(2)]],  // [batch, heads, rows]
    device T* dsinks [[buffer(3)]],                 // [heads]
    constant AttentionBackwardParams& params [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float scratch[32];
  const float sink = float(sinks[group.x]);
  float sum = 0;
  for (uint batch = 0; batch < params.batches; ++batch) {
    const size_t first = (size_t(batch) * params.heads + group.x) * params.rows;
    for (uint row = t; row < params.rows; row += 256) {
      const float total = logsumexp[first + row];
      sum -= total == -INFINITY ? 0.0f : exp_of<float>(sink - total) * statistics[first + row].y;
    }
  }
  sum = threadgroup_sum(sum, scratch, ThreadPosition{lane, simdgroup, 8});
  if (t == 0) {
    dsinks[group.x] = T(sum);
  }
}

instantiate_types("attention_statistics", attention_statistics)
instantiate_types("attention_finite", attention_finite)
instantiate_types("attention_dq_64", attention_dq, 64, 4)
instantiate_types("attention_dq_128", attention_dq, 128, 2)
instantiate_types("attention_dq_256", attention_dq, 256, 1)
instantiate_types("attention_dkv_64", attention_dkv, 64, 2, true, true)
instantiate_types("attention_dkv_128", attention_dkv, 128, 1, true, true)
instantiate_types("attention_dk_256", attention_dkv, 256, 1, true, false)
instantiate_types("attention_dv_256", attention_dkv, 256, 1, false, true)
instantiate_types("attention_dmask_64", attention_dmask, 64)
instantiate_types("attention_dmask_128", attention_dmask, 128)
instantiate_types("attention_dmask_256", attention_dmask, 256)
instantiate_types("attention_dsinks", attention_dsinks)
