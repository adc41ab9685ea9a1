// Layer norm over the last axis:
//
//   y[r, c] = T((x[r, c] - mean[r]) * n[r]) * weight[c] + bias[c],   n[r] = 1 / sqrt(variance[r] + eps)
//
// x, y [rows, columns], weight and bias [columns] or absent; float32 inside, rounded after each of the three steps as
// mx does. The variance is that of x - mean, never a difference of two sums. y may be x.
//
// The host chooses by the length of a row (csrc/ops/row_plan.h):
//   simd    L lanes a row, 32 / L * R rows a simdgroup, no barrier; the row stays in registers
//   block   one threadgroup a row, the row in registers: one read, two barriers
//   looped  one threadgroup a row, which is read twice
//   split   several threadgroups a row: split_sums leaves the moments of each in partials, split_write merges them
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/moments.h"
#include "mittens/reduce.h"
#include "mittens/row.h"
#include "params/layer_norm.h"

using namespace metal;
using namespace mittens;

inline float inverse_deviation(float deviation, uint columns, float eps) {
  return precise::rsqrt(deviation / float(columns) + eps);
}

template <typename T>
inline float scale_and_shift(float v, bool has_weight, float weight, bool has_bias, float bias) {
  if (has_weight) {
    v = round_to<T>(v) * weight;
  }
  return has_bias ? round_to<T>(v) + bias : v;
}

// Turns part, which holds x, into y. weight and bias are [columns].
template <typename T, int N>
inline void normalize_part(
    thread RowPart<T, N>& part, float mean, float n, const device T* weight, const device T* bias,
    constant LayerNormParams& params, RowSpan span, uint first, uint stride, uint end) {
  const bool weight_aligned = packs_aligned<T>(params.weight_phase, span);
  const bool bias_aligned = packs_aligned<T>(params.bias_phase, span);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint p = first + i * stride;
    const uint column = span.head + p * pack_size<T>();
    float v[16 / sizeof(T)];
    float w[16 / sizeof(T)];
    float b[16 / sizeof(T)];
    unpack<T>(part.packs[i], v);
    unpack<T>(params.has_weight && p < end ? load_pack(weight + column, weight_aligned) : uint4(0), w);
    unpack<T>(params.has_bias && p < end ? load_pack(bias + column, bias_aligned) : uint4(0), b);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      v[j] = scale_and_shift<T>((v[j] - mean) * n, params.has_weight, w[j], params.has_bias, b[j]);
    }
    part.packs[i] = pack<T>(v);
  }
}

template <typename T>
inline float normalize_edge(
    T x, float mean, float n, const device T* weight, const device T* bias, constant LayerNormParams& params,
    RowSpan span, uint t) {
  const T w = params.has_weight ? load_edge(weight, span, t, 0) : T(0);
  const T b = params.has_bias ? load_edge(bias, span, t, 0) : T(0);
  return scale_and_shift<T>((float(x) - mean) * n, params.has_weight, float(w), params.has_bias, float(b));
}

template <typename T, int L, int N, int R>
[[kernel, max_total_threads_per_threadgroup(256)]] void layer_norm_simd(
    const device T* x [[buffer(0)]],       // [rows, columns]
    const device T* weight [[buffer(1)]],  // [columns]
    const device T* bias [[buffer(2)]],    // [columns]
    device T* y [[buffer(3)]],             // [rows, columns]
    constant LayerNormParams& params [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint columns = params.row.columns;
  const uint first_row = (group * simdgroups + simdgroup) * (32 / L * R) + lane / L;
  const uint t = lane % L;

  RowSpan spans[R];
  RowPart<T, N> parts[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint row = first_row + r * (32 / L);
    spans[r] = row_span<T>(params.x_phase + row * columns, row < params.row.rows ? columns : 0);
    const device T* x_row = x + size_t(row) * columns;
    load_packs(x_row, spans[r], true, t, L, spans[r].packs, uint4(0), parts[r]);
    parts[r].edge = load_edge(x_row, spans[r], t, 0);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint row = first_row + r * (32 / L);
    const RowSpan span = spans[r];
    const float mean = lanes_sum<L>(part_sum(parts[r])) / float(columns);
    const float deviation = lanes_sum<L>(part_deviation(parts[r], mean, t < span.edges, t, L, span.packs));
    const float n = inverse_deviation(deviation, columns, params.eps);
    device T* y_row = y + size_t(row) * columns;
    store_edge(y_row, span, t, normalize_edge<T>(parts[r].edge, mean, n, weight, bias, params, span, t));
    normalize_part(parts[r], mean, n, weight, bias, params, span, t, L, span.packs);
    store_packs(
        y_row, span, packs_aligned<T>(params.y_phase + row * columns, span), t, L, span.packs, parts[r]);
  }
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(512)]] void layer_norm_block(
    const device T* x [[buffer(0)]],       // [rows, columns]
    const device T* weight [[buffer(1)]],  // [columns]
    const device T* bias [[buffer(2)]],    // [columns]
    device T* y [[buffer(3)]],             // [rows, columns]
    constant LayerNormParams& params [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float sums[32];
  threadgroup float deviations[32];
  const Place place = Place{lane, simdgroup, simdgroups};
  const uint columns = params.row.columns;
  const RowSpan span = row_span<T>(params.x_phase + row * columns, columns);
  const size_t start = size_t(row) * columns;

  RowPart<T, N> part;
  load_packs(x + start, span, true, t, threads, span.packs, uint4(0), part);
  part.edge = load_edge(x + start, span, t, 0);

  const float mean = threadgroup_sum(part_sum(part), sums, place) / float(columns);
  const float deviation =
      threadgroup_sum(part_deviation(part, mean, t < span.edges, t, threads, span.packs), deviations, place);
  const float n = inverse_deviation(deviation, columns, params.eps);

  store_edge(y + start, span, t, normalize_edge<T>(part.edge, mean, n, weight, bias, params, span, t));
  normalize_part(part, mean, n, weight, bias, params, span, t, threads, span.packs);
  store_packs(
      y + start, span, packs_aligned<T>(params.y_phase + row * columns, span), t, threads, span.packs, part);
}

template <typename T, int N>
inline void range_normalize(
    const device T* x_row, const device T* weight, const device T* bias, device T* y_row,
    constant LayerNormParams& params, bool y_aligned, RowSpan span, uint begin, uint end, bool edges, Moments moments,
    uint t, uint threads) {
  const float n = inverse_deviation(moments.deviation, params.row.columns, params.eps);
  RowPart<T, N> part;
  for (uint first = begin + t; first < end; first += N * threads) {
    load_packs(x_row, span, true, first, threads, end, uint4(0), part);
    normalize_part(part, moments.mean, n, weight, bias, params, span, first, threads, end);
    store_packs(y_row, span, y_aligned, first, threads, end, part);
  }
  if (edges) {
    const T x = load_edge(x_row, span, t, 0);
    store_edge(y_row, span, t, normalize_edge<T>(x, moments.mean, n, weight, bias, params, span, t));
  }
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(512)]] void layer_norm_looped(
    const device T* x [[buffer(0)]],       // [rows, columns]
    const device T* weight [[buffer(1)]],  // [columns]
    const device T* bias [[buffer(2)]],    // [columns]
    device T* y [[buffer(3)]],             // [rows, columns]
    constant LayerNormParams& params [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[96];
  const uint columns = params.row.columns;
  const RowSpan span = row_span<T>(params.x_phase + row * columns, columns);
  const size_t start = size_t(row) * columns;

  const Moments moments = threadgroup_merge(
      range_moments<T, N>(x + start, span, 0, span.packs, true, t, threads), scratch,
      Place{lane, simdgroup, simdgroups});
  range_normalize<T, N>(
      x + start, weight, bias, y + start, params, packs_aligned<T>(params.y_phase + row * columns, span), span, 0,
      span.packs, true, moments, t, threads);
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(256)]] void layer_norm_split_sums(
    const device T* x [[buffer(0)]],        // [rows, columns]
    device float* partials [[buffer(1)]],   // [rows, splits, 3]: count, mean, deviation
    constant LayerNormParams& params [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[96];
  const uint columns = params.row.columns;
  const uint row = group / params.row.splits;
  const uint split = group % params.row.splits;
  const RowSpan span = row_span<T>(params.x_phase + row * columns, columns);
  const uint begin = split * params.row.packs_per_split;
  const uint end = min(begin + params.row.packs_per_split, span.packs);

  const Moments moments = threadgroup_merge(
      range_moments<T, N>(x + size_t(row) * columns, span, begin, end, split == 0, t, threads), scratch,
      Place{lane, simdgroup, simdgroups});
  if (t == 0) {
    partials[3 * group] = moments.count;
    partials[3 * group + 1] = moments.mean;
    partials[3 * group + 2] = moments.deviation;
  }
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(256)]] void layer_norm_split_write(
    const device T* x [[buffer(0)]],             // [rows, columns]
    const device T* weight [[buffer(1)]],        // [columns]
    const device T* bias [[buffer(2)]],          // [columns]
    const device float* partials [[buffer(3)]],  // [rows, splits, 3]: count, mean, deviation
    device T* y [[buffer(4)]],                   // [rows, columns]
    constant LayerNormParams& params [[buffer(5)]],
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

  Moments moments = Moments{0, 0, 0};
  for (uint i = lane; i < params.row.splits; i += 32) {
    const device float* partial = partials + 3 * (row * params.row.splits + i);
    moments = merge(moments, Moments{partial[0], partial[1], partial[2]});
  }
  range_normalize<T, N>(
      x + start, weight, bias, y + start, params, packs_aligned<T>(params.y_phase + row * columns, span), span, begin,
      end, split == 0, simd_merge(moments), t, threads);
}

instantiate_types("layer_norm_simd8", layer_norm_simd, 8, 1, 2)
instantiate_types("layer_norm_simd16", layer_norm_simd, 16, 1, 2)
instantiate_types("layer_norm_simd32", layer_norm_simd, 32, 1, 2)
instantiate_types("layer_norm_simd32x2", layer_norm_simd, 32, 2, 1)
instantiate_types("layer_norm_simd32x4", layer_norm_simd, 32, 4, 1)
instantiate_types("layer_norm_block1", layer_norm_block, 1)
instantiate_types("layer_norm_block2", layer_norm_block, 2)
instantiate_types("layer_norm_block4", layer_norm_block, 4)
instantiate_types("layer_norm_looped", layer_norm_looped, 4)
instantiate_types("layer_norm_split_sums", layer_norm_split_sums, 4)
instantiate_types("layer_norm_split_write", layer_norm_split_write, 4)
