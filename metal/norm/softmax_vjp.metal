// Gradient of softmax over the last axis, from its output y and the output's gradient dy:
//
//   dx[r, c] = T(y[r, c] * (dy[r, c] - d[r])),   d[r] = sum_c y[r, c] * dy[r, c] / sum_c y[r, c]
//
// y, dy, dx [rows, columns]; float32 inside, rounded once. dx may be y or dy. The y of a row add up to 1 before they are
// rounded to T; where one of them is nearly 1, dy - d without the division would be mostly what rounding took from it.
//
// The host chooses by the length of a row (csrc/ops/norm/plan.h):
//   simd    L lanes a row, 32 / L * R rows a simdgroup, no barrier; the row stays in registers
//   block   one threadgroup a row, the row in registers: one read, one barrier
//   looped  one threadgroup a row, which is read twice
//   split   several threadgroups a row: split_sums leaves each one's share of both sums, split_write adds them up
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/reduce.h"
#include "mittens/row_io.h"
#include "params/norm.h"

using namespace metal;
using namespace mittens;

// Adds y * dy to sums[0] and y to sums[1]; what lies outside the row holds zeros.
template <typename T, int N>
inline void add_part(thread const RowPart<T, N>& y, thread const RowPart<T, N>& dy, thread float (&sums)[2]) {
  sums[0] += float(y.edge) * float(dy.edge);
  sums[1] += float(y.edge);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float v[16 / sizeof(T)];
    float g[16 / sizeof(T)];
    unpack<T>(y.packs[i], v);
    unpack<T>(dy.packs[i], g);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      sums[0] += v[j] * g[j];
      sums[1] += v[j];
    }
  }
}

// The mean of dy, weighted by y. Of a row so long that all y round to zero, zero.
inline float weighted_mean(float dot, float sum) {
  return sum == 0.0f ? 0.0f : dot / sum;
}

template <typename T>
inline float gradient(T y, T dy, float mean) {
  return float(y) * (float(dy) - mean);
}

// y becomes dx.
template <typename T, int N>
inline void gradient_part(thread RowPart<T, N>& y, thread const RowPart<T, N>& dy, float mean) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float v[16 / sizeof(T)];
    float g[16 / sizeof(T)];
    unpack<T>(y.packs[i], v);
    unpack<T>(dy.packs[i], g);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      v[j] *= g[j] - mean;
    }
    y.packs[i] = pack<T>(v);
  }
}

template <typename T, int L, int N, int R>
[[kernel, max_total_threads_per_threadgroup(256)]] void softmax_vjp_simd(
    const device T* y [[buffer(0)]],   // [rows, columns]
    const device T* dy [[buffer(1)]],  // [rows, columns]
    device T* dx [[buffer(2)]],        // [rows, columns]
    constant SoftmaxVjpParams& params [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint columns = params.row.columns;
  const uint first_row = (group * simdgroups + simdgroup) * (32 / L * R) + lane / L;
  const uint t = lane % L;

  RowSpan spans[R];
  RowPart<T, N> parts[R];
  RowPart<T, N> gradients[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint row = first_row + r * (32 / L);
    const size_t start = size_t(row) * columns;
    spans[r] = row_span<T>(params.y_phase + row * columns, row < params.row.rows ? columns : 0);
    const bool aligned = packs_aligned<T>(params.dy_phase + row * columns, spans[r]);
    load_packs(y + start, spans[r], true, t, L, spans[r].packs, uint4(0), parts[r]);
    load_packs(dy + start, spans[r], aligned, t, L, spans[r].packs, uint4(0), gradients[r]);
    parts[r].edge = load_edge(y + start, spans[r], t, 0);
    gradients[r].edge = load_edge(dy + start, spans[r], t, 0);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint row = first_row + r * (32 / L);
    const size_t start = size_t(row) * columns;
    const bool aligned = packs_aligned<T>(params.dx_phase + row * columns, spans[r]);
    float sums[2] = {0, 0};
    add_part(parts[r], gradients[r], sums);
    const float mean = weighted_mean(lanes_sum<L>(sums[0]), lanes_sum<L>(sums[1]));
    store_edge(dx + start, spans[r], t, gradient(parts[r].edge, gradients[r].edge, mean));
    gradient_part(parts[r], gradients[r], mean);
    store_packs(dx + start, spans[r], aligned, t, L, spans[r].packs, parts[r]);
  }
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(512)]] void softmax_vjp_block(
    const device T* y [[buffer(0)]],   // [rows, columns]
    const device T* dy [[buffer(1)]],  // [rows, columns]
    device T* dx [[buffer(2)]],        // [rows, columns]
    constant SoftmaxVjpParams& params [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[64];
  const uint columns = params.row.columns;
  const uint shift = row * columns;
  const RowSpan span = row_span<T>(params.y_phase + shift, columns);
  const size_t start = size_t(row) * columns;

  RowPart<T, N> part;
  RowPart<T, N> gradients;
  load_packs(y + start, span, true, t, threads, span.packs, uint4(0), part);
  load_packs(
      dy + start, span, packs_aligned<T>(params.dy_phase + shift, span), t, threads, span.packs, uint4(0), gradients);
  part.edge = load_edge(y + start, span, t, 0);
  gradients.edge = load_edge(dy + start, span, t, 0);

  float sums[2] = {0, 0};
  add_part(part, gradients, sums);
  threadgroup_sums<2>(sums, scratch, ThreadPosition{lane, simdgroup, simdgroups});
  const float mean = weighted_mean(sums[0], sums[1]);
  store_edge(dx + start, span, t, gradient(part.edge, gradients.edge, mean));
  gradient_part(part, gradients, mean);
  store_packs(dx + start, span, packs_aligned<T>(params.dx_phase + shift, span), t, threads, span.packs, part);
}

// Adds up the packs begin .. end, and this thread's edge element if the caller takes the edges.
template <typename T, int N>
inline void add_range(
    const device T* y, const device T* dy, bool dy_aligned, RowSpan span, uint begin, uint end, bool edges, uint t,
    uint threads, thread float (&sums)[2]) {
  const float y_edge = edges ? float(load_edge(y, span, t, 0)) : 0.0f;
  sums[0] += edges ? y_edge * float(load_edge(dy, span, t, 0)) : 0.0f;
  sums[1] += y_edge;
  RowPart<T, N> part;
  RowPart<T, N> gradients;
  clear(part);
  clear(gradients);
  for (uint first = begin + t; first < end; first += N * threads) {
    load_packs(y, span, true, first, threads, end, uint4(0), part);
    load_packs(dy, span, dy_aligned, first, threads, end, uint4(0), gradients);
    add_part(part, gradients, sums);
  }
}

template <typename T, int N>
inline void range_gradient(
    const device T* y, const device T* dy, bool dy_aligned, device T* dx, bool dx_aligned, RowSpan span, uint begin,
    uint end, bool edges, float mean, uint t, uint threads) {
  RowPart<T, N> part;
  RowPart<T, N> gradients;
  for (uint first = begin + t; first < end; first += N * threads) {
    load_packs(y, span, true, first, threads, end, uint4(0), part);
    load_packs(dy, span, dy_aligned, first, threads, end, uint4(0), gradients);
    gradient_part(part, gradients, mean);
    store_packs(dx, span, dx_aligned, first, threads, end, part);
  }
  if (edges) {
    store_edge(dx, span, t, gradient(load_edge(y, span, t, 0), load_edge(dy, span, t, 0), mean));
  }
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(512)]] void softmax_vjp_looped(
    const device T* y [[buffer(0)]],   // [rows, columns]
    const device T* dy [[buffer(1)]],  // [rows, columns]
    device T* dx [[buffer(2)]],        // [rows, columns]
    constant SoftmaxVjpParams& params [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[64];
  const uint columns = params.row.columns;
  const uint shift = row * columns;
  const RowSpan span = row_span<T>(params.y_phase + shift, columns);
  const size_t start = size_t(row) * columns;
  const bool dy_aligned = packs_aligned<T>(params.dy_phase + shift, span);

  float sums[2] = {0, 0};
  add_range<T, N>(y + start, dy + start, dy_aligned, span, 0, span.packs, true, t, threads, sums);
  threadgroup_sums<2>(sums, scratch, ThreadPosition{lane, simdgroup, simdgroups});
  range_gradient<T, N>(
      y + start, dy + start, dy_aligned, dx + start, packs_aligned<T>(params.dx_phase + shift, span), span, 0,
      span.packs, true, weighted_mean(sums[0], sums[1]), t, threads);
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(256)]] void softmax_vjp_split_sums(
    const device T* y [[buffer(0)]],        // [rows, columns]
    const device T* dy [[buffer(1)]],       // [rows, columns]
    device float2* partials [[buffer(2)]],  // [rows, splits]: sums of y * dy and of y
    constant SoftmaxVjpParams& params [[buffer(3)]],
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
  const uint shift = row * columns;
  const RowSpan span = row_span<T>(params.y_phase + shift, columns);
  const uint begin = split * params.row.packs_per_split;
  const uint end = min(begin + params.row.packs_per_split, span.packs);
  const size_t start = size_t(row) * columns;

  float sums[2] = {0, 0};
  add_range<T, N>(
      y + start, dy + start, packs_aligned<T>(params.dy_phase + shift, span), span, begin, end, split == 0, t,
      threads, sums);
  threadgroup_sums<2>(sums, scratch, ThreadPosition{lane, simdgroup, simdgroups});
  if (t == 0) {
    partials[group] = float2(sums[0], sums[1]);
  }
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(256)]] void softmax_vjp_split_write(
    const device T* y [[buffer(0)]],              // [rows, columns]
    const device T* dy [[buffer(1)]],             // [rows, columns]
    const device float2* partials [[buffer(2)]],  // [rows, splits]: sums of y * dy and of y
    device T* dx [[buffer(3)]],                   // [rows, columns]
    constant SoftmaxVjpParams& params [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint columns = params.row.columns;
  const uint row = group / params.row.splits;
  const uint split = group % params.row.splits;
  const uint shift = row * columns;
  const RowSpan span = row_span<T>(params.y_phase + shift, columns);
  const uint begin = split * params.row.packs_per_split;
  const uint end = min(begin + params.row.packs_per_split, span.packs);
  const size_t start = size_t(row) * columns;

  float2 sums = float2(0);
  for (uint i = lane; i < params.row.splits; i += 32) {
    sums += partials[row * params.row.splits + i];
  }
  const float mean = weighted_mean(simd_sum(sums.x), simd_sum(sums.y));
  range_gradient<T, N>(
      y + start, dy + start, packs_aligned<T>(params.dy_phase + shift, span), dx + start,
      packs_aligned<T>(params.dx_phase + shift, span), span, begin, end, split == 0, mean, t, threads);
}

instantiate_types("softmax_vjp_simd8", softmax_vjp_simd, 8, 1, 2)
instantiate_types("softmax_vjp_simd16", softmax_vjp_simd, 16, 1, 2)
instantiate_types("softmax_vjp_simd32", softmax_vjp_simd, 32, 1, 2)
instantiate_types("softmax_vjp_simd32x2", softmax_vjp_simd, 32, 2, 1)
instantiate_types("softmax_vjp_simd32x4", softmax_vjp_simd, 32, 4, 1)
instantiate_types("softmax_vjp_block1", softmax_vjp_block, 1)
instantiate_types("softmax_vjp_block2", softmax_vjp_block, 2)
instantiate_types("softmax_vjp_block4", softmax_vjp_block, 4)
instantiate_types("softmax_vjp_looped", softmax_vjp_looped, 4)
instantiate_types("softmax_vjp_split_sums", softmax_vjp_split_sums, 2)
instantiate_types("softmax_vjp_split_write", softmax_vjp_split_write, 2)
