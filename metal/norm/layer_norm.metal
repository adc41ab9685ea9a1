// Layer norm over the last axis:
//
//   y[r, c] = T((x[r, c] - mean[r]) * n[r]) * weight[c] + bias[c],   n[r] = 1 / sqrt(variance[r] + eps)
//
// x, y [rows, columns], weight and bias [columns] or absent; float32 inside, rounded after each of the three steps as
// mx does. The variance is that of x - mean, never a difference of two sums; past the range of float32 it is infinite,
// and T((x - mean) * n) is 0. y may be x.
//
// The host chooses by the length of a row (csrc/ops/norm/plan.h):
//   simd    L lanes a row, 32 / L * R rows a simdgroup, no barrier; the row stays in registers
//   block   one threadgroup a row, the row in registers: one read, one barrier
//   looped  one threadgroup a row, which is read twice
//   split   several threadgroups a row: split_sums leaves the moments of each in partials, split_write merges them
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/reduce.h"
#include "mittens/row_io.h"
#include "norm/welford.h"
#include "params/norm.h"

using namespace metal;
using namespace mittens;

// What normalizes a row, in halves: (x - mean) * n is (x / 2 - mean / 2) * 2 n, which does not overflow on the way.
struct RowTerms {
  float half_mean;
  float twice_n;
};

inline RowTerms row_terms(Moments moments, uint columns, float eps) {
  return RowTerms{0.5f * moments.mean, 2.0f * precise::rsqrt(moments.m2 / float(columns) + eps)};
}

inline float normed(float x, RowTerms row) {
  return half_centred(x, row.half_mean) * row.twice_n;
}

template <typename T>
inline float scale_and_shift(float v, bool has_weight, float weight, bool has_bias, float bias) {
  if (has_weight) {
    v = round_to<T>(v) * weight;
  }
  return has_bias ? round_to<T>(v) + bias : v;
}

// What one pack of x is multiplied by and added to.
struct PackTerms {
  uint4 weight;
  uint4 bias;
};

// scale_and_shift of a pack.
template <typename T>
inline uint4 normalize_pack(uint4 x, RowTerms row, bool has_weight, bool has_bias, PackTerms terms) {
  float v[16 / sizeof(T)];
  unpack<T>(x, v);
#pragma unroll
  for (int j = 0; j < pack_size<T>(); ++j) {
    v[j] = normed(v[j], row);
  }
  if (has_weight) {
    float w[16 / sizeof(T)];
    unpack<T>(terms.weight, w);
    round_values<T>(v);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      v[j] *= w[j];
    }
  }
  if (has_bias) {
    float b[16 / sizeof(T)];
    unpack<T>(terms.bias, b);
    round_values<T>(v);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      v[j] += b[j];
    }
  }
  return pack<T>(v);
}

template <typename T, bool Whole>
inline PackTerms load_terms(
    const device T* weight, const device T* bias, constant LayerNormParams& params, RowSpan span, uint p, uint end) {
  const uint column = span.head + p * pack_size<T>();
  PackTerms terms = PackTerms{uint4(0), uint4(0)};
  if (params.has_weight && p < end) {
    terms.weight = load_pack(weight + column, packs_aligned<T, Whole>(params.weight_phase, span));
  }
  if (params.has_bias && p < end) {
    terms.bias = load_pack(bias + column, packs_aligned<T, Whole>(params.bias_phase, span));
  }
  return terms;
}

// Writes the packs of y for those of x in part, which it uses up: a loop whose packs move up keeps them packed until
// their turn comes. The terms of the next pack are on their way meanwhile.
template <bool Whole, typename T, int N>
inline void write_part(
    thread RowPart<T, N>& part, PackTerms terms, RowTerms row, const device T* weight, const device T* bias,
    device T* y_row, bool y_aligned, constant LayerNormParams& params, RowSpan span, uint first, uint stride,
    uint end) {
#pragma unroll 1
  for (int i = 0; i < N; ++i) {
    const uint p = first + i * stride;
    if (p >= end) {
      break;
    }
    PackTerms next = terms;
    if (N > 1) {
      next = load_terms<T, Whole>(weight, bias, params, span, p + stride, end);
    }
    store_pack(
        y_row + span.head + p * pack_size<T>(), y_aligned,
        normalize_pack<T>(part.packs[0], row, params.has_weight, params.has_bias, terms));
    terms = next;
#pragma unroll
    for (int k = 1; k < N; ++k) {
      part.packs[k - 1] = part.packs[k];
    }
  }
}

template <typename T>
inline float normalize_edge(
    T x, RowTerms row, const device T* weight, const device T* bias, constant LayerNormParams& params,
    RowSpan span, uint t) {
  const T w = params.has_weight ? load_edge(weight, span, t, 0) : T(0);
  const T b = params.has_bias ? load_edge(bias, span, t, 0) : T(0);
  return scale_and_shift<T>(normed(float(x), row), params.has_weight, float(w), params.has_bias, float(b));
}

// Of a row in L lanes. One pack a lane stays unpacked until the row's mean is known; more would not fit registers.
template <int L, typename T, int N>
inline Moments lanes_moments(thread const RowPart<T, N>& part, bool has_edge, uint packs, uint columns, uint lane) {
  const uint t = lane % L;
  if constexpr (N > 1) {
    return lanes_merge<L>(part_moments(part, has_edge, t, L, packs), float(columns), lane);
  }
  const float mean = scaled_mean(lanes_sum<L>(part_sum(part)), float(columns));
  return Moments{float(columns), mean, lanes_sum<L>(part_deviation(part, mean, has_edge, t, L, packs))};
}

template <typename T, int L, int N, int R, bool Whole>
inline void normalize_rows(
    const device T* x, const device T* weight, const device T* bias, device T* y, constant LayerNormParams& params,
    uint first_row, uint lane) {
  const uint columns = params.row.columns;
  const uint t = lane % L;
  RowSpan spans[R];
  RowPart<T, N> parts[R];
  PackTerms terms[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint row = first_row + r * (32 / L);
    spans[r] = row_span<T, Whole>(params.x_phase + row * columns, row < params.row.rows ? columns : 0);
    const device T* x_row = x + size_t(row) * columns;
    load_packs(x_row, spans[r], true, t, L, spans[r].packs, uint4(0), parts[r]);
    parts[r].edge = load_edge(x_row, spans[r], t, 0);
    terms[r] = load_terms<T, Whole>(weight, bias, params, spans[r], t, spans[r].packs);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint row = first_row + r * (32 / L);
    const RowSpan span = spans[r];
    const Moments moments = lanes_moments<L>(parts[r], t < span.edges, span.packs, columns, lane);
    const RowTerms terms_of_row = row_terms(moments, columns, params.eps);
    device T* y_row = y + size_t(row) * columns;
    store_edge(y_row, span, t, normalize_edge<T>(parts[r].edge, terms_of_row, weight, bias, params, span, t));
    write_part<Whole>(
        parts[r], terms[r], terms_of_row, weight, bias, y_row,
        packs_aligned<T, Whole>(params.y_phase + row * columns, span), params, span, t, L, span.packs);
  }
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
  const uint first_row = (group * simdgroups + simdgroup) * (32 / L * R) + lane / L;
  if (params.row.whole) {
    normalize_rows<T, L, N, R, true>(x, weight, bias, y, params, first_row, lane);
  } else {
    normalize_rows<T, L, N, R, false>(x, weight, bias, y, params, first_row, lane);
  }
}

template <typename T, int N, bool Whole>
inline void normalize_row(
    const device T* x, const device T* weight, const device T* bias, device T* y, constant LayerNormParams& params,
    uint row, uint t, uint threads, threadgroup float* scratch, ThreadPosition position) {
  const uint columns = params.row.columns;
  const RowSpan span = row_span<T, Whole>(params.x_phase + row * columns, columns);
  const size_t start = size_t(row) * columns;

  RowPart<T, N> part;
  load_packs(x + start, span, true, t, threads, span.packs, uint4(0), part);
  part.edge = load_edge(x + start, span, t, 0);

  const Moments own = simd_merge(part_moments(part, t < span.edges, t, threads, span.packs));
  const PackTerms terms = load_terms<T, Whole>(weight, bias, params, span, t, span.packs);
  const Moments moments = simdgroups_merge(own, scratch, position);
  const RowTerms terms_of_row = row_terms(moments, columns, params.eps);

  store_edge(y + start, span, t, normalize_edge<T>(part.edge, terms_of_row, weight, bias, params, span, t));
  write_part<Whole>(
      part, terms, terms_of_row, weight, bias, y + start,
      packs_aligned<T, Whole>(params.y_phase + row * columns, span), params, span, t, threads, span.packs);
}

template <typename T, int N>
[[kernel, threads_at_most(N == 8 ? 256 : 512, 512)]] void layer_norm_block(
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
  const ThreadPosition position = ThreadPosition{lane, simdgroup, simdgroups};
  if (params.row.whole) {
    normalize_row<T, N, true>(x, weight, bias, y, params, row, t, threads, scratch, position);
  } else {
    normalize_row<T, N, false>(x, weight, bias, y, params, row, t, threads, scratch, position);
  }
}

template <typename T, int N>
inline void range_normalize(
    const device T* x_row, const device T* weight, const device T* bias, device T* y_row,
    constant LayerNormParams& params, bool y_aligned, RowSpan span, uint begin, uint end, bool edges, Moments moments,
    uint t, uint threads) {
  const RowTerms row = row_terms(moments, params.row.columns, params.eps);
  RowPart<T, N> part;
  for (uint first = begin + t; first < end; first += N * threads) {
    load_packs(x_row, span, true, first, threads, end, uint4(0), part);
    write_part<false>(
        part, load_terms<T, false>(weight, bias, params, span, first, end), row, weight, bias, y_row,
        y_aligned, params, span, first, threads, end);
  }
  if (edges) {
    const T x = load_edge(x_row, span, t, 0);
    store_edge(y_row, span, t, normalize_edge<T>(x, row, weight, bias, params, span, t));
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

  const Moments own = simd_merge(range_moments<T, N>(x + start, span, 0, span.packs, true, t, threads));
  const Moments moments = simdgroups_merge(own, scratch, ThreadPosition{lane, simdgroup, simdgroups});
  range_normalize<T, N>(
      x + start, weight, bias, y + start, params, packs_aligned<T>(params.y_phase + row * columns, span), span, 0,
      span.packs, true, moments, t, threads);
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(256)]] void layer_norm_split_sums(
    const device T* x [[buffer(0)]],        // [rows, columns]
    device float* partials [[buffer(1)]],   // [rows, splits, 3]: count, mean, m2
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

  const Moments own = simd_merge(
      range_moments<T, N>(x + size_t(row) * columns, span, begin, end, split == 0, t, threads));
  const Moments moments = simdgroups_merge(own, scratch, ThreadPosition{lane, simdgroup, simdgroups});
  if (t == 0) {
    partials[3 * group] = moments.count;
    partials[3 * group + 1] = moments.mean;
    partials[3 * group + 2] = moments.m2;
  }
}

template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(256)]] void layer_norm_split_write(
    const device T* x [[buffer(0)]],             // [rows, columns]
    const device T* weight [[buffer(1)]],        // [columns]
    const device T* bias [[buffer(2)]],          // [columns]
    const device float* partials [[buffer(3)]],  // [rows, splits, 3]: count, mean, m2
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
instantiate_types("layer_norm_block8", layer_norm_block, 8)
instantiate_types("layer_norm_looped", layer_norm_looped, 4)
instantiate_types("layer_norm_split_sums", layer_norm_split_sums, 2)
instantiate_types("layer_norm_split_write", layer_norm_split_write, 2)
