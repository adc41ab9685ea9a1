// A residual sum and its root mean square norm in one pass over memory:
//
//   sum[r, c] = T(x[r, c] + residual[r, c])
//   y[r, c]   = T(sum[r, c] * n[r]) * weight[c],   n[r] = 1 / sqrt(mean_c(sum[r, c]^2) + eps)
//
// x, residual, y, sum [rows, columns], weight [columns] or absent; float32 inside, the norm is that of the rounded sum.
// y may be x and sum may be residual.
//
// The host chooses by the length of a row (csrc/ops/norm/plan.h):
//   simd    L lanes a row, 32 / L * R rows a simdgroup, no barrier; the row stays in registers
//   block   one threadgroup a row, the row in registers: one read, one barrier
//   looped  one threadgroup a row; the second pass reads the sum that the first one wrote
//   split   several threadgroups a row: split_sums writes the sum and leaves each one's sum of squares in partials,
//           split_write adds these up
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/reduce.h"
#include "mittens/rms.h"
#include "params/norm.h"

using namespace metal;
using namespace mittens;

// x becomes T(x + residual).
template <typename T, int N>
inline void add_part(thread RowPart<T, N>& x, thread const RowPart<T, N>& residual) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float v[16 / sizeof(T)];
    float w[16 / sizeof(T)];
    unpack<T>(x.packs[i], v);
    unpack<T>(residual.packs[i], w);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      v[j] += w[j];
    }
    x.packs[i] = pack<T>(v);
  }
  x.edge = T(float(x.edge) + float(residual.edge));
}

template <typename T, int L, int N, int R, bool Whole>
inline void add_and_normalize_rows(
    const device T* x, const device T* residual, const device T* weight, device T* y, device T* sum,
    constant AddRmsNormParams& params, uint first_row, uint t) {
  const uint columns = params.row.columns;
  RowSpan spans[R];
  RowPart<T, N> parts[R];
  RowPart<T, N> residuals[R];
  WeightAhead<T, N> ahead[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint row = first_row + r * (32 / L);
    const size_t start = size_t(row) * columns;
    spans[r] = row_span<T, Whole>(params.x_phase + row * columns, row < params.row.rows ? columns : 0);
    const bool aligned = packs_aligned<T, Whole>(params.residual_phase + row * columns, spans[r]);
    load_packs(x + start, spans[r], true, t, L, spans[r].packs, uint4(0), parts[r]);
    load_packs(residual + start, spans[r], aligned, t, L, spans[r].packs, uint4(0), residuals[r]);
    parts[r].edge = load_edge(x + start, spans[r], t, 0);
    residuals[r].edge = load_edge(residual + start, spans[r], t, 0);
    const bool weight_aligned = packs_aligned<T, Whole>(params.weight_phase, spans[r]);
    load_weights(weight, params.has_weight, weight_aligned, spans[r], t, t, L, spans[r].packs, ahead[r]);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint row = first_row + r * (32 / L);
    const size_t start = size_t(row) * columns;
    add_part(parts[r], residuals[r]);
    const bool sum_aligned = packs_aligned<T, Whole>(params.sum_phase + row * columns, spans[r]);
    store_packs(sum + start, spans[r], sum_aligned, t, L, spans[r].packs, parts[r]);
    store_edge(sum + start, spans[r], t, float(parts[r].edge));
    const float n = rstd(lanes_sum<L>(square_sum(parts[r])), columns, params.eps);
    store_edge(y + start, spans[r], t, normalize_edge<T>(parts[r].edge, n, params.has_weight, ahead[r].edge));
    write_part(
        parts[r], ahead[r], n, weight, params.has_weight, packs_aligned<T, Whole>(params.weight_phase, spans[r]),
        y + start, packs_aligned<T, Whole>(params.y_phase + row * columns, spans[r]), spans[r], t, L, spans[r].packs);
  }
}

template <typename T, int L, int N, int R>
[[kernel, max_total_threads_per_threadgroup(256)]] void add_rms_norm_simd(
    const device T* x [[buffer(0)]],         // [rows, columns]
    const device T* residual [[buffer(1)]],  // [rows, columns]
    const device T* weight [[buffer(2)]],    // [columns]
    device T* y [[buffer(3)]],               // [rows, columns]
    device T* sum [[buffer(4)]],             // [rows, columns]
    constant AddRmsNormParams& params [[buffer(5)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint first_row = (group * simdgroups + simdgroup) * (32 / L * R) + lane / L;
  if (params.row.whole) {
    add_and_normalize_rows<T, L, N, R, true>(x, residual, weight, y, sum, params, first_row, lane % L);
  } else {
    add_and_normalize_rows<T, L, N, R, false>(x, residual, weight, y, sum, params, first_row, lane % L);
  }
}

template <typename T, int N, bool Whole>
inline void add_and_normalize_row(
    const device T* x, const device T* residual, const device T* weight, device T* y, device T* sum,
    constant AddRmsNormParams& params, uint row, uint t, uint threads, threadgroup float* scratch,
    ThreadPosition position) {
  const uint columns = params.row.columns;
  const uint shift = row * columns;
  const RowSpan span = row_span<T, Whole>(params.x_phase + shift, columns);
  const size_t start = size_t(row) * columns;
  const bool residual_aligned = packs_aligned<T, Whole>(params.residual_phase + shift, span);
  const bool weight_aligned = packs_aligned<T, Whole>(params.weight_phase, span);
  const bool sum_aligned = packs_aligned<T, Whole>(params.sum_phase + shift, span);

  RowPart<T, N> part;
  RowPart<T, N> residuals;
  load_packs(x + start, span, true, t, threads, span.packs, uint4(0), part);
  load_packs(residual + start, span, residual_aligned, t, threads, span.packs, uint4(0), residuals);
  part.edge = load_edge(x + start, span, t, 0);
  residuals.edge = load_edge(residual + start, span, t, 0);
  WeightAhead<T, N> ahead;
  load_weights(weight, params.has_weight, weight_aligned, span, t, t, threads, span.packs, ahead);
  add_part(part, residuals);
  store_packs(sum + start, span, sum_aligned, t, threads, span.packs, part);
  store_edge(sum + start, span, t, float(part.edge));
  const float n = rstd(threadgroup_sum(square_sum(part), scratch, position), columns, params.eps);
  store_edge(y + start, span, t, normalize_edge<T>(part.edge, n, params.has_weight, ahead.edge));
  write_part(
      part, ahead, n, weight, params.has_weight, weight_aligned, y + start,
      packs_aligned<T, Whole>(params.y_phase + shift, span), span, t, threads, span.packs);
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(512)]] void add_rms_norm_block(
    const device T* x [[buffer(0)]],         // [rows, columns]
    const device T* residual [[buffer(1)]],  // [rows, columns]
    const device T* weight [[buffer(2)]],    // [columns]
    device T* y [[buffer(3)]],               // [rows, columns]
    device T* sum [[buffer(4)]],             // [rows, columns]
    constant AddRmsNormParams& params [[buffer(5)]],
    uint row [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[32];
  const ThreadPosition position = ThreadPosition{lane, simdgroup, simdgroups};
  if (params.row.whole) {
    add_and_normalize_row<T, N, true>(x, residual, weight, y, sum, params, row, t, threads, scratch, position);
  } else {
    add_and_normalize_row<T, N, false>(x, residual, weight, y, sum, params, row, t, threads, scratch, position);
  }
}

// Writes sum over the packs begin .. end, and this thread's edge element if the caller takes the edges; their squares'
// sum. All pointers are to the start of a row.
template <typename T, int N>
inline float range_add(
    const device T* x, const device T* residual, bool residual_aligned, device T* sum, bool sum_aligned, RowSpan span,
    uint begin, uint end, bool edges, uint t, uint threads) {
  RowPart<T, N> part;
  RowPart<T, N> other;
  part.edge = edges ? load_edge(x, span, t, 0) : T(0);
  other.edge = edges ? load_edge(residual, span, t, 0) : T(0);
  float squares = 0;
  // The edge element goes in with the first batch, which may hold no pack.
  for (uint first = begin + t; first == begin + t || first < end; first += N * threads) {
    load_packs(x, span, true, first, threads, end, uint4(0), part);
    load_packs(residual, span, residual_aligned, first, threads, end, uint4(0), other);
    add_part(part, other);
    squares += square_sum(part);
    store_packs(sum, span, sum_aligned, first, threads, end, part);
    if (edges) {
      store_edge(sum, span, t, float(part.edge));
    }
    edges = false;
    part.edge = T(0);
    other.edge = T(0);
  }
  return squares;
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(512)]] void add_rms_norm_looped(
    const device T* x [[buffer(0)]],         // [rows, columns]
    const device T* residual [[buffer(1)]],  // [rows, columns]
    const device T* weight [[buffer(2)]],    // [columns]
    device T* y [[buffer(3)]],               // [rows, columns]
    device T* sum [[buffer(4)]],             // [rows, columns]
    constant AddRmsNormParams& params [[buffer(5)]],
    uint row [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[32];
  const uint columns = params.row.columns;
  const uint shift = row * columns;
  const RowSpan span = row_span<T>(params.x_phase + shift, columns);
  const size_t start = size_t(row) * columns;
  const bool sum_aligned = packs_aligned<T>(params.sum_phase + shift, span);

  const float own = range_add<T, N>(
      x + start, residual + start, packs_aligned<T>(params.residual_phase + shift, span), sum + start, sum_aligned,
      span, 0, span.packs, true, t, threads);
  const float squares = threadgroup_sum(own, scratch, ThreadPosition{lane, simdgroup, simdgroups});
  range_normalize<T, N>(
      sum + start, sum_aligned, weight, y + start, packs_aligned<T>(params.y_phase + shift, span), params, span, 0,
      span.packs, true, rstd(squares, columns, params.eps), t, threads);
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(256)]] void add_rms_norm_split_sums(
    const device T* x [[buffer(0)]],         // [rows, columns]
    const device T* residual [[buffer(1)]],  // [rows, columns]
    device T* sum [[buffer(2)]],             // [rows, columns]
    device float* partials [[buffer(3)]],    // [rows, splits]
    constant AddRmsNormParams& params [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[32];
  const uint columns = params.row.columns;
  const uint row = group / params.row.splits;
  const uint split = group % params.row.splits;
  const uint shift = row * columns;
  const RowSpan span = row_span<T>(params.x_phase + shift, columns);
  const uint begin = split * params.row.packs_per_split;
  const uint end = min(begin + params.row.packs_per_split, span.packs);
  const size_t start = size_t(row) * columns;

  const float own = range_add<T, N>(
      x + start, residual + start, packs_aligned<T>(params.residual_phase + shift, span), sum + start,
      packs_aligned<T>(params.sum_phase + shift, span), span, begin, end, split == 0, t, threads);
  const float squares = threadgroup_sum(own, scratch, ThreadPosition{lane, simdgroup, simdgroups});
  if (t == 0) {
    partials[group] = squares;
  }
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(256)]] void add_rms_norm_split_write(
    const device T* sum [[buffer(0)]],           // [rows, columns]
    const device T* weight [[buffer(1)]],        // [columns]
    const device float* partials [[buffer(2)]],  // [rows, splits]
    device T* y [[buffer(3)]],                   // [rows, columns]
    constant AddRmsNormParams& params [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint columns = params.row.columns;
  const uint row = group / params.row.splits;
  const uint split = group % params.row.splits;
  const uint shift = row * columns;
  const RowSpan span = row_span<T>(params.x_phase + shift, columns);
  const uint begin = split * params.row.packs_per_split;
  const uint end = min(begin + params.row.packs_per_split, span.packs);
  const size_t start = size_t(row) * columns;

  float squares = 0;
  for (uint i = lane; i < params.row.splits; i += 32) {
    squares += partials[row * params.row.splits + i];
  }
  range_normalize<T, N>(
      sum + start, packs_aligned<T>(params.sum_phase + shift, span), weight, y + start,
      packs_aligned<T>(params.y_phase + shift, span), params, span, begin, end, split == 0,
      rstd(simd_sum(squares), columns, params.eps), t, threads);
}

instantiate_types("add_rms_norm_simd8", add_rms_norm_simd, 8, 1, 2)
instantiate_types("add_rms_norm_simd16", add_rms_norm_simd, 16, 1, 2)
instantiate_types("add_rms_norm_simd32", add_rms_norm_simd, 32, 1, 2)
instantiate_types("add_rms_norm_simd32x2", add_rms_norm_simd, 32, 2, 1)
instantiate_types("add_rms_norm_simd32x4", add_rms_norm_simd, 32, 4, 1)
instantiate_types("add_rms_norm_block1", add_rms_norm_block, 1)
instantiate_types("add_rms_norm_block2", add_rms_norm_block, 2)
instantiate_types("add_rms_norm_block4", add_rms_norm_block, 4)
instantiate_types("add_rms_norm_looped", add_rms_norm_looped, 4)
instantiate_types("add_rms_norm_split_sums", add_rms_norm_split_sums, 2)
instantiate_types("add_rms_norm_split_write", add_rms_norm_split_write, 2)
