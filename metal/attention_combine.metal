// What threadgroups leave that share the keys of a row, put together: of each split the sum of its values, each
// weighted by its distance from the split's maximum, that maximum, and the sum of the weights.
//
//   y = sum_s e^(m[s] - m) * sums[s] / (sum_s e^(m[s] - m) * totals[s] + e^(sink - m)),   m = max(m[s], sink)
//
// A threadgroup takes a row. Its threads share out the splits, each with the same four columns of every split it takes, so
// that all loads are on their way at once; the order of the sum is always the same.
#include <metal_stdlib>

#include "mittens/attention.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

constant constexpr uint combine_threads = 256;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(combine_threads)]] void attention_combine(
    const device float* partials [[buffer(0)]],  // sums [splits, rows, width], maxima and totals [rows, splits]
    const device T* sinks [[buffer(1)]],         // [heads]
    device T* y [[buffer(2)]],                   // [rows, width]
    constant AttentionCombineParams& params [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 scratch[combine_threads];
  const uint splits = params.splits;
  const device float* maxima = partials + size_t(splits) * params.rows * params.width + row * splits;
  const device float* totals = maxima + size_t(params.rows) * splits;

  float maximum = params.has_sinks ? float(sinks[row / params.queries % params.heads]) * score_unit<T>() : -INFINITY;
  const float sink = maximum;
  for (uint s = lane; s < splits; s += 32) {
    maximum = max(maximum, maxima[s]);
  }
  maximum = simd_max(maximum);
  const float base = finite_maximum(maximum);
  float total = lane == 0 ? weight_of<T>(sink - base) : 0.0f;
  for (uint s = lane; s < splits; s += 32) {
    total = fma(totals[s], weight_of<T>(maxima[s] - base), total);
  }
  total = simd_sum(total);

  const uint quads = params.width / 4;
  const uint sharers = combine_threads / quads;
  const device float4* sums = (const device float4*)partials + row * quads + t % quads;
  constexpr uint at_once = 4;
  float4 sum = float4(0.0f);
  for (uint first = t / quads; first < splits; first += at_once * sharers) {
    float4 parts[at_once];
    float weights[at_once];
#pragma unroll
    for (uint i = 0; i < at_once; ++i) {
      const uint s = first + i * sharers;
      const bool there = s < splits && t < sharers * quads;
      parts[i] = there ? sums[size_t(s) * params.rows * quads] : float4(0.0f);
      weights[i] = there ? weight_of<T>(maxima[s] - base) : 0.0f;
    }
#pragma unroll
    for (uint i = 0; i < at_once; ++i) {
      sum = fma(parts[i], float4(weights[i]), sum);
    }
  }
  scratch[t] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < quads) {
    for (uint other = 1; other < sharers; ++other) {
      sum += scratch[other * quads + t];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      y[(size_t(row) * quads + t) * 4 + j] = T(sum[j] / total);
    }
  }
}

instantiate_kernel("attention_combine_float32", attention_combine, float)
instantiate_kernel("attention_combine_float16", attention_combine, half)
instantiate_kernel("attention_combine_bfloat16", attention_combine, bfloat)
