// What threadgroups leave that share the keys of a row, put together: of each split the sum of its values, each
// weighted by its distance from the split's maximum, that maximum, and the sum of the weights.
//
//   y = sum_s e^(m[s] - m) * sums[s] / sum_s e^(m[s] - m) * totals[s],   m = max m[s]
//
// A threadgroup takes 32 columns of a row. Eight neighbouring lanes load four of them each, of the same split, and four
// splits at once; which of them counts how much is found while these are on their way. The order of the sum is always
// the same.
#include <metal_stdlib>

#include "mittens/online_softmax.h"
#include "mittens/instantiate.h"
#include "params/attention.h"

using namespace metal;
using namespace mittens;

constant constexpr uint combine_threads = 256;
constant constexpr uint quads = 8;  // of columns
constant constexpr uint sharers = combine_threads / quads;
constant constexpr uint at_once = 4;  // splits

// Four columns of some splits, and how much each counts.
struct Shares {
  float4 sums[at_once];
  float maxima[at_once];
};

// Splits first, first + sharers .. of which there are `splits`, `stride` quads apart.
inline Shares load_shares(const device float4* sums, const device float* maxima, uint first, uint splits, size_t stride) {
  Shares shares;
#pragma unroll
  for (uint i = 0; i < at_once; ++i) {
    const uint s = first + i * sharers;
    shares.sums[i] = s < splits ? sums[s * stride] : float4(0.0f);
    shares.maxima[i] = s < splits ? maxima[s] : -INFINITY;
  }
  return shares;
}

// The state of all splits, in every lane.
template <typename T>
inline SoftmaxState<float> merged_state(
    const device float* maxima, const device float* totals, uint splits, uint lane) {
  SoftmaxState<float> own{-INFINITY, 0.0f};
  for (uint first = lane; first < splits; first += at_once * 32) {
    float m[at_once];
    float t[at_once];
    float maximum = own.m;
#pragma unroll
    for (uint i = 0; i < at_once; ++i) {
      const bool there = first + i * 32 < splits;
      m[i] = there ? maxima[first + i * 32] : -INFINITY;
      t[i] = there ? totals[first + i * 32] : 0.0f;
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

template <typename T>
[[kernel, max_total_threads_per_threadgroup(combine_threads)]] void attention_combine(
    const device float* partials [[buffer(0)]],  // sums [splits, rows, width], maxima and totals [rows, splits]
    device T* y [[buffer(1)]],                   // [rows, width]
    device float* logsumexp [[buffer(2)]],       // [rows]
    constant AttentionCombineParams& params [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 scratch[combine_threads / 32 * quads];
  const uint row = group.x;
  const uint splits = params.splits;
  const uint row_quads = params.width / 4;
  const uint quad = group.y * quads + t % quads;
  const device float4* sums = (const device float4*)partials + size_t(row) * row_quads + min(quad, row_quads - 1);
  const size_t stride = size_t(params.rows) * row_quads;
  const device float* maxima = partials + splits * stride * 4 + size_t(row) * splits;
  const device float* totals = maxima + size_t(params.rows) * splits;

  Shares shares = load_shares(sums, maxima, t / quads, splits, stride);
  const SoftmaxState<float> all = merged_state<T>(maxima, totals, splits, lane);
  const float base = finite_maximum(all.m);
  float4 sum = float4(0.0f);
  for (uint first = t / quads; first < splits; first += at_once * sharers) {
    if (first >= at_once * sharers) {
      shares = load_shares(sums, maxima, first, splits, stride);
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
  if (lane < quads) {
    scratch[t / 32 * quads + lane] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < quads && quad < row_quads) {
    const float inverse = inverse_sum(all.m, all.l);
#pragma unroll
    for (uint other = 1; other < combine_threads / 32; ++other) {
      sum += scratch[other * quads + t];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      y[(size_t(row) * row_quads + quad) * 4 + j] = T(sum[j] * inverse);
    }
    if (quad == 0 && params.has_logsumexp) {
      logsumexp[row] = logsumexp_of<T>(all.m, all.l);
    }
  }
}

instantiate_kernel("attention_combine_float32", attention_combine, float)
instantiate_kernel("attention_combine_float16", attention_combine, half)
instantiate_kernel("attention_combine_bfloat16", attention_combine, bfloat)
