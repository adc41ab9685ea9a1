// The sum of a row's parts in attention whose threadgroups share the keys of a row. A part has the sum of its values,
// each weighted by its distance from the part's maximum, that maximum, and the sum of the weights.
//
//   y = sum_s e^(m[s] - m) * sums[s] / sum_s e^(m[s] - m) * totals[s],   m = max m[s]
//
// A threadgroup takes 32 columns of a row. Eight neighbouring lanes load four of them each, of the same part, and four
// parts at once. The weights of the parts are computed while these loads are on their way. The order of the sum is
// always the same.
#pragma once

#include "mittens/instantiate.h"
#include "mittens/online_softmax.h"
#include "params/attention.h"

namespace mittens {

constant constexpr uint quads = 8;    // of columns
constant constexpr uint at_once = 4;  // parts

// The parts that a launch left of a row: sums [splits, rows, width], maxima and totals [rows, splits].
struct RowParts {
  const device float4* sums;  // the lane's, of the first part
  const device float* maxima;
  const device float* totals;
  size_t stride;  // of sums
  uint count;

  float4 sum(uint s) const {
    return sums[s * stride];
  }
  float maximum(uint s) const {
    return maxima[s];
  }
  float total(uint s) const {
    return totals[s];
  }
};

inline RowParts row_parts(const device float* partials, uint row, uint rows, uint splits, uint width, uint quad) {
  const uint row_quads = width / 4;
  RowParts parts;
  parts.sums = (const device float4*)partials + size_t(row) * row_quads + min(quad, row_quads - 1);
  parts.stride = size_t(rows) * row_quads;
  parts.maxima = partials + splits * parts.stride * 4 + size_t(row) * splits;
  parts.totals = parts.maxima + size_t(rows) * splits;
  parts.count = splits;
  return parts;
}

// Four columns of some parts, and how much each counts.
struct Shares {
  float4 sums[at_once];
  float maxima[at_once];
};

// Parts first, first + sharers ..
template <uint sharers, typename Parts>
inline Shares load_shares(Parts parts, uint first) {
  Shares shares;
#pragma unroll
  for (uint i = 0; i < at_once; ++i) {
    const uint s = first + i * sharers;
    shares.sums[i] = s < parts.count ? parts.sum(s) : float4(0.0f);
    shares.maxima[i] = s < parts.count ? parts.maximum(s) : -INFINITY;
  }
  return shares;
}

// The state of all parts, in every lane.
template <typename T, typename Parts>
inline SoftmaxState<float> merged_state(Parts parts, uint lane) {
  SoftmaxState<float> own{-INFINITY, 0.0f};
  for (uint first = lane; first < parts.count; first += at_once * 32) {
    float m[at_once];
    float t[at_once];
    float maximum = own.m;
#pragma unroll
    for (uint i = 0; i < at_once; ++i) {
      const bool there = first + i * 32 < parts.count;
      m[i] = there ? parts.maximum(first + i * 32) : -INFINITY;
      t[i] = there ? parts.total(first + i * 32) : 0.0f;
    }
#pragma unroll
    for (uint i = 0; i < at_once; ++i) {
      maximum = max(maximum, m[i]);
    }
    const float base = finite_maximum(maximum);
    own.l *= softmax_weight<T>(own.m - base);
#pragma unroll
    for (uint i = 0; i < at_once; ++i) {
      own.l = fma(t[i], softmax_weight<T>(m[i] - base), own.l);
    }
    own.m = maximum;
  }
  const float maximum = simd_max(own.m);
  return {maximum, simd_sum(own.l * softmax_weight<T>(own.m - finite_maximum(maximum)))};
}

// Writes four columns of a row, in the first lanes, and returns the row's state.
template <uint simdgroups, typename T, typename Parts>
inline SoftmaxState<float> combine(
    Parts parts, device T* y, uint quad, uint row_quads, threadgroup float4* scratch, uint t, uint lane) {
  constexpr uint sharers = simdgroups * 32 / quads;
  Shares shares = load_shares<sharers>(parts, t / quads);
  const SoftmaxState<float> all = merged_state<T>(parts, lane);
  const float base = finite_maximum(all.m);
  float4 sum = float4(0.0f);
  for (uint first = t / quads; first < parts.count; first += at_once * sharers) {
    if (first >= at_once * sharers) {
      shares = load_shares<sharers>(parts, first);
    }
#pragma unroll
    for (uint i = 0; i < at_once; ++i) {
      sum = fma(shares.sums[i], float4(softmax_weight<T>(shares.maxima[i] - base)), sum);
    }
  }

#pragma unroll
  for (ushort mask = quads; mask < 32; mask *= 2) {
    sum += simd_shuffle_xor(sum, mask);
  }
  if constexpr (simdgroups > 1) {
    if (lane < quads) {
      scratch[t / 32 * quads + lane] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  if (t < quads && quad < row_quads) {
    const float inverse = inverse_sum(all.m, all.l);
#pragma unroll
    for (uint other = 1; other < simdgroups; ++other) {
      sum += scratch[other * quads + t];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      y[quad * 4 + j] = T(sum[j] * inverse);
    }
  }
  return all;
}

}  // namespace mittens
