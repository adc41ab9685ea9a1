// Softmax over the last axis:
//
//   y[r, c] = T(exp(x[r, c] - m[r]) / s[r]),   m[r] = max_c x[r, c],   s[r] = sum_c exp(x[r, c] - m[r])
//
// x, y [rows, columns]; float32 inside, rounded once. exp(v) is taken as exp2(v * log2(e)). y may be x.
// A row that is all -inf, or holds a NaN or +inf, becomes NaN, as in mx.
//
// The host chooses by the length of a row (csrc/ops/norm/plan.h):
//   simd    L lanes a row, 32 / L * R rows a simdgroup, no barrier; the row stays in registers
//   block   one threadgroup a row, the row in registers as exponentials: one read, one barrier
//   looped  one threadgroup a row, which is read twice; maximum and sum are found together in the first pass
//   split   several threadgroups a row: split_sums leaves maximum and sum of each in partials, split_write merges them
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/reduce.h"
#include "mittens/row_io.h"
#include "mittens/softmax.h"
#include "params/norm.h"

using namespace metal;
using namespace mittens;

template <typename T, int L, int N, int R, bool Whole>
inline void softmax_rows(const device T* x, device T* y, constant SoftmaxParams& params, uint first_row, uint t) {
  const uint columns = params.row.columns;
  RowSpan spans[R];
  RowPart<T, N> parts[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint row = first_row + r * (32 / L);
    spans[r] = row_span<T, Whole>(params.x_phase + row * columns, row < params.row.rows ? columns : 0);
    const device T* x_row = x + size_t(row) * columns;
    load_packs(x_row, spans[r], true, t, L, spans[r].packs, pack_of<T>(-INFINITY), parts[r]);
    parts[r].edge = load_edge(x_row, spans[r], t, -INFINITY);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint row = first_row + r * (32 / L);
    Exponentials<T, N> e;
    const float sum = lanes_sum<L>(exponentials(parts[r], lanes_max<L>(maximum(parts[r])), e));
    scale(e, 1.0f / sum, parts[r]);
    device T* y_row = y + size_t(row) * columns;
    const bool aligned = packs_aligned<T, Whole>(params.y_phase + row * columns, spans[r]);
    store_packs(y_row, spans[r], aligned, t, L, spans[r].packs, parts[r]);
    store_edge(y_row, spans[r], t, float(parts[r].edge));
  }
}

template <typename T, int L, int N, int R>
[[kernel, max_total_threads_per_threadgroup(256)]] void softmax_simd(
    const device T* x [[buffer(0)]],  // [rows, columns]
    device T* y [[buffer(1)]],        // [rows, columns]
    constant SoftmaxParams& params [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint first_row = (group * simdgroups + simdgroup) * (32 / L * R) + lane / L;
  if (params.row.whole) {
    softmax_rows<T, L, N, R, true>(x, y, params, first_row, lane % L);
  } else {
    softmax_rows<T, L, N, R, false>(x, y, params, first_row, lane % L);
  }
}

template <typename T, int N, bool Whole>
inline void softmax_row(
    const device T* x, device T* y, constant SoftmaxParams& params, uint row, uint t, uint threads,
    threadgroup float* scratch, ThreadPosition position) {
  const uint columns = params.row.columns;
  const RowSpan span = row_span<T, Whole>(params.x_phase + row * columns, columns);
  const size_t start = size_t(row) * columns;

  RowPart<T, N> part;
  load_packs(x + start, span, true, t, threads, span.packs, pack_of<T>(-INFINITY), part);
  part.edge = load_edge(x + start, span, t, -INFINITY);

  // Each simdgroup takes exponentials against its own maximum, so that one barrier serves maximum and sum.
  SoftmaxState<float> own;
  own.m = simd_max(maximum(part));
  Exponentials<T, N> e;
  own.l = simd_sum(exponentials(part, finite_maximum(own.m), e));
  const SoftmaxState<float> all = threadgroup_merge<T>(own, scratch, position);
  scale(e, exp_of<T>(own.m - all.m) / all.l, part);
  const bool aligned = packs_aligned<T, Whole>(params.y_phase + row * columns, span);
  store_packs(y + start, span, aligned, t, threads, span.packs, part);
  store_edge(y + start, span, t, float(part.edge));
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(512)]] void softmax_block(
    const device T* x [[buffer(0)]],  // [rows, columns]
    device T* y [[buffer(1)]],        // [rows, columns]
    constant SoftmaxParams& params [[buffer(2)]],
    uint row [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[64];
  const ThreadPosition position = ThreadPosition{lane, simdgroup, simdgroups};
  if (params.row.whole) {
    softmax_row<T, N, true>(x, y, params, row, t, threads, scratch, position);
  } else {
    softmax_row<T, N, false>(x, y, params, row, t, threads, scratch, position);
  }
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(512)]] void softmax_looped(
    const device T* x [[buffer(0)]],  // [rows, columns]
    device T* y [[buffer(1)]],        // [rows, columns]
    constant SoftmaxParams& params [[buffer(2)]],
    uint row [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[64];
  const uint columns = params.row.columns;
  const RowSpan span = row_span<T>(params.x_phase + row * columns, columns);
  const size_t start = size_t(row) * columns;

  const SoftmaxState<float> own =
      simd_merge<T>(range_softmax_state<T, N>(x + start, span, 0, span.packs, true, t, threads));
  RowPart<T, N> part;
  load_packs(x + start, span, true, t, threads, span.packs, uint4(0), part);
  const SoftmaxState<float> all = threadgroup_merge<T>(own, scratch, ThreadPosition{lane, simdgroup, simdgroups});
  range_softmax(
      part, x + start, y + start, packs_aligned<T>(params.y_phase + row * columns, span), span, 0, span.packs, true, all,
      t, threads);
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(256)]] void softmax_split_sums(
    const device T* x [[buffer(0)]],         // [rows, columns]
    device float2* partials [[buffer(1)]],   // [rows, splits]: maximum and sum
    constant SoftmaxParams& params [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[64];
  const uint columns = params.row.columns;
  const uint row = group / params.row.splits;
  const uint split = group % params.row.splits;
  const RowSpan span = row_span<T>(params.x_phase + row * columns, columns);
  const uint begin = split * params.row.packs_per_split;
  const uint end = min(begin + params.row.packs_per_split, span.packs);

  const SoftmaxState<float> own =
      simd_merge<T>(range_softmax_state<T, N>(x + size_t(row) * columns, span, begin, end, split == 0, t, threads));
  const SoftmaxState<float> all = threadgroup_merge<T>(own, scratch, ThreadPosition{lane, simdgroup, simdgroups});
  if (t == 0) {
    partials[group] = float2(all.m, all.l);
  }
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(256)]] void softmax_split_write(
    const device T* x [[buffer(0)]],              // [rows, columns]
    const device float2* partials [[buffer(1)]],  // [rows, splits]: maximum and sum
    device T* y [[buffer(2)]],                    // [rows, columns]
    constant SoftmaxParams& params [[buffer(3)]],
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

  RowPart<T, N> part;
  load_packs(x + start, span, true, begin + t, threads, end, uint4(0), part);
  SoftmaxState<float> all = SoftmaxState<float>{-INFINITY, 0};
  for (uint i = lane; i < params.row.splits; i += 32) {
    const float2 partial = partials[row * params.row.splits + i];
    all = merge<T>(all, SoftmaxState<float>{partial.x, partial.y});
  }
  range_softmax(
      part, x + start, y + start, packs_aligned<T>(params.y_phase + row * columns, span), span, begin, end, split == 0,
      simd_merge<T>(all), t, threads);
}

instantiate_types("softmax_simd8", softmax_simd, 8, 1, 2)
instantiate_types("softmax_simd16", softmax_simd, 16, 1, 2)
instantiate_types("softmax_simd32", softmax_simd, 32, 1, 2)
instantiate_types("softmax_simd32x2", softmax_simd, 32, 2, 1)
instantiate_types("softmax_simd32x4", softmax_simd, 32, 4, 1)
instantiate_types("softmax_block1", softmax_block, 1)
instantiate_types("softmax_block2", softmax_block, 2)
instantiate_types("softmax_block4", softmax_block, 4)
instantiate_types("softmax_looped", softmax_looped, 4)
instantiate_types("softmax_split_sums", softmax_split_sums, 2)
instantiate_types("softmax_split_write", softmax_split_write, 2)
