// Root mean square norm over the last axis:
//
//   y[r, c] = T(x[r, c] * n[r]) * weight[c],   n[r] = 1 / sqrt(mean_c(x[r, c]^2) + eps)
//
// x, y [rows, columns], weight [columns] or absent; sums in float32. y may be x.
//
// The host chooses by the length of a row (csrc/ops/norm/plan.h):
//   simd    L lanes a row, 32 / L * R rows a simdgroup, no barrier; the row stays in registers
//   block   one threadgroup a row, the row in registers: one read, one barrier
//   looped  one threadgroup a row, which is read twice
//   split   several threadgroups a row: split_sums leaves a partial sum of each in sums, split_write adds them up
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/reduce.h"
#include "mittens/rms.h"
#include "params/norm.h"

using namespace metal;
using namespace mittens;

template <typename T, int L, int N, int R, bool Whole>
inline void normalize_rows(
    const device T* x, const device T* weight, device T* y, constant RmsNormParams& params, uint first_row, uint t) {
  const uint columns = params.row.columns;
  RowSpan spans[R];
  RowPart<T, N> parts[R];
  WeightAhead<T, N> ahead[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint row = first_row + r * (32 / L);
    spans[r] = row_span<T, Whole>(params.x_phase + row * columns, row < params.row.rows ? columns : 0);
    const device T* x_row = x + size_t(row) * columns;
    load_packs(x_row, spans[r], true, t, L, spans[r].packs, uint4(0), parts[r]);
    parts[r].edge = load_edge(x_row, spans[r], t, 0);
    const bool aligned = packs_aligned<T, Whole>(params.weight_phase, spans[r]);
    load_weights(weight, params.has_weight, aligned, spans[r], t, t, L, spans[r].packs, ahead[r]);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint row = first_row + r * (32 / L);
    const float n = rstd(lanes_sum<L>(square_sum(parts[r])), columns, params.eps);
    device T* y_row = y + size_t(row) * columns;
    store_edge(y_row, spans[r], t, normalize_edge<T>(parts[r].edge, n, params.has_weight, ahead[r].edge));
    write_part(
        parts[r], ahead[r], n, weight, params.has_weight, packs_aligned<T, Whole>(params.weight_phase, spans[r]), y_row,
        packs_aligned<T, Whole>(params.y_phase + row * columns, spans[r]), spans[r], t, L, spans[r].packs);
  }
}

template <typename T, int L, int N, int R>
[[kernel, max_total_threads_per_threadgroup(256)]] void rms_norm_simd(
    const device T* x [[buffer(0)]],       // [rows, columns]
    const device T* weight [[buffer(1)]],  // [columns]
    device T* y [[buffer(2)]],             // [rows, columns]
    constant RmsNormParams& params [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint first_row = (group * simdgroups + simdgroup) * (32 / L * R) + lane / L;
  if (params.row.whole) {
    normalize_rows<T, L, N, R, true>(x, weight, y, params, first_row, lane % L);
  } else {
    normalize_rows<T, L, N, R, false>(x, weight, y, params, first_row, lane % L);
  }
}

template <typename T, int N, bool Whole>
inline void normalize_row(
    const device T* x, const device T* weight, device T* y, constant RmsNormParams& params, uint row, uint t,
    uint threads, threadgroup float* scratch, ThreadPosition position) {
  const uint columns = params.row.columns;
  const RowSpan span = row_span<T, Whole>(params.x_phase + row * columns, columns);
  const device T* x_row = x + size_t(row) * columns;
  const bool weight_aligned = packs_aligned<T, Whole>(params.weight_phase, span);

  RowPart<T, N> part;
  load_packs(x_row, span, true, t, threads, span.packs, uint4(0), part);
  part.edge = load_edge(x_row, span, t, 0);
  WeightAhead<T, N> ahead;
  load_weights(weight, params.has_weight, weight_aligned, span, t, t, threads, span.packs, ahead);
  const float n = rstd(threadgroup_sum(square_sum(part), scratch, position), columns, params.eps);
  device T* y_row = y + size_t(row) * columns;
  store_edge(y_row, span, t, normalize_edge<T>(part.edge, n, params.has_weight, ahead.edge));
  write_part(
      part, ahead, n, weight, params.has_weight, weight_aligned, y_row,
      packs_aligned<T, Whole>(params.y_phase + row * columns, span), span, t, threads, span.packs);
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(512)]] void rms_norm_block(
    const device T* x [[buffer(0)]],       // [rows, columns]
    const device T* weight [[buffer(1)]],  // [columns]
    device T* y [[buffer(2)]],             // [rows, columns]
    constant RmsNormParams& params [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[32];
  const ThreadPosition position = ThreadPosition{lane, simdgroup, simdgroups};
  if (params.row.whole) {
    normalize_row<T, N, true>(x, weight, y, params, row, t, threads, scratch, position);
  } else {
    normalize_row<T, N, false>(x, weight, y, params, row, t, threads, scratch, position);
  }
}

// Sum of squares of the packs begin .. end, and of this thread's edge element if the caller takes the edges.
template <typename T, int N>
inline float range_square_sum(
    const device T* x_row, RowSpan span, uint begin, uint end, bool edges, uint t, uint threads) {
  RowPart<T, N> part;
  part.edge = edges ? load_edge(x_row, span, t, 0) : T(0);
  float sum = float(part.edge) * float(part.edge);
  part.edge = T(0);
  for (uint first = begin + t; first < end; first += N * threads) {
    load_packs(x_row, span, true, first, threads, end, uint4(0), part);
    sum += square_sum(part);
  }
  return sum;
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(512)]] void rms_norm_looped(
    const device T* x [[buffer(0)]],       // [rows, columns]
    const device T* weight [[buffer(1)]],  // [columns]
    device T* y [[buffer(2)]],             // [rows, columns]
    constant RmsNormParams& params [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[32];
  const uint columns = params.row.columns;
  const RowSpan span = row_span<T>(params.x_phase + row * columns, columns);
  const size_t start = size_t(row) * columns;

  const float sum = threadgroup_sum(
      range_square_sum<T, N>(x + start, span, 0, span.packs, true, t, threads), scratch,
      ThreadPosition{lane, simdgroup, simdgroups});
  const float n = rstd(sum, columns, params.eps);
  range_normalize<T, N>(
      x + start, true, weight, y + start, packs_aligned<T>(params.y_phase + row * columns, span), params, span, 0,
      span.packs, true, n, t, threads);
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(256)]] void rms_norm_split_sums(
    const device T* x [[buffer(0)]],    // [rows, columns]
    device float* sums [[buffer(1)]],   // [rows, splits]
    constant RmsNormParams& params [[buffer(2)]],
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
  const RowSpan span = row_span<T>(params.x_phase + row * columns, columns);
  const uint begin = split * params.row.packs_per_split;
  const uint end = min(begin + params.row.packs_per_split, span.packs);

  const float sum = threadgroup_sum(
      range_square_sum<T, N>(x + size_t(row) * columns, span, begin, end, split == 0, t, threads), scratch,
      ThreadPosition{lane, simdgroup, simdgroups});
  if (t == 0) {
    sums[group] = sum;
  }
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(256)]] void rms_norm_split_write(
    const device T* x [[buffer(0)]],         // [rows, columns]
    const device T* weight [[buffer(1)]],    // [columns]
    const device float* sums [[buffer(2)]],  // [rows, splits]
    device T* y [[buffer(3)]],               // [rows, columns]
    constant RmsNormParams& params [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint columns = params.row.columns;
  const uint row = group / params.row.splits;
  const uint split = group % params.row.splits;
  const RowSpan span = row_span<T>(params.x_phase + row * columns, columns);
  const uint begin = split * params.row.packs_per_split;
  const uint end = min(begin + params.row.packs_per_split, span.packs);
  const size_t start = size_t(row) * columns;

  float sum = 0;
  for (uint i = lane; i < params.row.splits; i += 32) {
    sum += sums[row * params.row.splits + i];
  }
  const float n = rstd(simd_sum(sum), columns, params.eps);
  range_normalize<T, N>(
      x + start, true, weight, y + start, packs_aligned<T>(params.y_phase + row * columns, span), params, span, begin,
      end, split == 0, n, t, threads);
}

instantiate_types("rms_norm_simd8", rms_norm_simd, 8, 1, 2)
instantiate_types("rms_norm_simd16", rms_norm_simd, 16, 1, 2)
instantiate_types("rms_norm_simd32", rms_norm_simd, 32, 1, 2)
instantiate_types("rms_norm_simd32x2", rms_norm_simd, 32, 2, 1)
instantiate_types("rms_norm_simd32x4", rms_norm_simd, 32, 4, 1)
instantiate_types("rms_norm_block1", rms_norm_block, 1)
instantiate_types("rms_norm_block2", rms_norm_block, 2)
instantiate_types("rms_norm_block4", rms_norm_block, 4)
instantiate_types("rms_norm_looped", rms_norm_looped, 4)
instantiate_types("rms_norm_split_sums", rms_norm_split_sums, 2)
instantiate_types("rms_norm_split_write", rms_norm_split_write, 2)
