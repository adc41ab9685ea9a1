// Root mean square norms of the heads of queries and of keys, in one launch:
//
//   y[r, c] = T(x[r, c] * n[r]) * (weight[c] + offset),   n[r] = 1 / sqrt(mean_c(x[r, c]^2) + eps)
//
// A row is a head of a token: x [outer, middle, inner, width] by strides, as a projection and a transpose leave it; y
// [rows, width]; weight [width] or absent; sums in float32. Rows of queries come first in the grid, then rows of keys.
//
// The host chooses by the width (csrc/ops/norm/qk_norm.cpp):
//   simd    L lanes a row, which stays in registers; no barrier
//   looped  a threadgroup a row, which is read twice
#include <metal_stdlib>

#include "norm/rms_norm.h"

using namespace metal;
using namespace mittens;

// The norm of a row of the grid, as of an array of one row.
template <typename T>
inline RmsNorm<T> norm_of_row(
    const device T* x, WeightInput<T> weight, device T* y, uint y_phase, constant HeadRows& rows, uint row,
    constant QkNormParams& params) {
  const size_t from = row / rows.inner / rows.middle * rows.strides[0] +
                      row / rows.inner % rows.middle * rows.strides[1] + row % rows.inner * rows.strides[2];
  const size_t to = size_t(row) * params.row.columns;
  return RmsNorm<T>{
      {{x + from, rows.phase + uint(from)}}, {weight}, {y + to, y_phase + uint(to)}, params.eps, params.weight_offset};
}

template <typename T>
inline RmsNorm<T> norm_of_head(
    const device T* queries, const device T* keys, const device T* query_weight, const device T* key_weight,
    device T* normed_queries, device T* normed_keys, constant QkNormParams& params, uint row) {
  if (row < params.queries.rows) {
    const WeightInput<T> weight = WeightInput<T>{query_weight, params.query_weight_phase, params.has_query_weight != 0};
    return norm_of_row(queries, weight, normed_queries, params.query_output_phase, params.queries, row, params);
  }
  const WeightInput<T> weight = WeightInput<T>{key_weight, params.key_weight_phase, params.has_key_weight != 0};
  return norm_of_row(
      keys, weight, normed_keys, params.key_output_phase, params.keys, row - params.queries.rows, params);
}

template <typename T, int L, int N>
[[kernel, max_total_threads_per_threadgroup(128)]] void qk_norm_simd(
    const device T* queries [[buffer(0)]],       // [outer, middle, inner, width] by params.queries
    const device T* keys [[buffer(1)]],          // the same by params.keys
    const device T* query_weight [[buffer(2)]],  // [width]
    const device T* key_weight [[buffer(3)]],    // [width]
    device T* normed_queries [[buffer(4)]],      // [rows of queries, width]
    device T* normed_keys [[buffer(5)]],         // [rows of keys, width]
    constant QkNormParams& params [[buffer(6)]], row_thread_parameters) {
  const uint row = (group * simdgroups + simdgroup) * (32 / L) + lane / L;
  const uint rows = params.queries.rows + params.keys.rows;
  const uint there = min(row, rows - 1);
  const RmsNorm<T> op =
      norm_of_head(queries, keys, query_weight, key_weight, normed_queries, normed_keys, params, there);
  const LaneTeam<L> team = LaneTeam<L>{lane % L, L, lane, params.row.columns};
  // The array of one row has no second one: lanes past the last row take it.
  if (params.row.whole) {
    row_held<N>(NoOp(), op, team, params.row, uint(row >= rows), true);
  } else {
    row_held<N>(NoOp(), op, team, params.row, uint(row >= rows), false);
  }
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(512)]] void qk_norm_looped(
    const device T* queries [[buffer(0)]],       // [outer, middle, inner, width] by params.queries
    const device T* keys [[buffer(1)]],          // the same by params.keys
    const device T* query_weight [[buffer(2)]],  // [width]
    const device T* key_weight [[buffer(3)]],    // [width]
    device T* normed_queries [[buffer(4)]],      // [rows of queries, width]
    device T* normed_keys [[buffer(5)]],         // [rows of keys, width]
    constant QkNormParams& params [[buffer(6)]], row_thread_parameters) {
  threadgroup float scratch[32];
  const RmsNorm<T> op =
      norm_of_head(queries, keys, query_weight, key_weight, normed_queries, normed_keys, params, group);
  const RowThread thread_of = RowThread{0, t, threads, ThreadPosition{lane, simdgroup, simdgroups}};
  run_rows(Looped<N>(), NoOp(), op, params.row, thread_of, scratch);
}

instantiate_types("qk_norm_simd8", qk_norm_simd, 8, 1)
instantiate_types("qk_norm_simd16", qk_norm_simd, 16, 1)
instantiate_types("qk_norm_simd32", qk_norm_simd, 32, 1)
instantiate_types("qk_norm_simd32x2", qk_norm_simd, 32, 2)
instantiate_types("qk_norm_simd32x4", qk_norm_simd, 32, 4)
instantiate_types("qk_norm_looped", qk_norm_looped, looped_packs(is_nvidia))
