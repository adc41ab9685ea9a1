// What threadgroups leave that share the keys of a row, put together: of each split the sum of its values, each
// weighted by its distance from the split's maximum, that maximum, and the sum of the weights.
//
//   y = sum_s e^(m[s] - m) * sums[s] / (sum_s e^(m[s] - m) * totals[s] + e^(sink - m)),   m = max(m[s], sink)
//
// A threadgroup takes a row; its simdgroups share out the splits, always added up in the same order.
#include <metal_stdlib>

#include "mittens/attention.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

constant constexpr int combine_simdgroups = 8;
constant constexpr int most_width = 256;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void attention_combine(
    const device float* partials [[buffer(0)]],  // [splits, (rows * width) + rows + rows]
    const device T* sinks [[buffer(1)]],         // [heads]
    device T* y [[buffer(2)]],                   // [rows, width]
    constant AttentionCombineParams& params [[buffer(3)]],
    uint row [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float scratch[combine_simdgroups * most_width];
  const size_t plane = size_t(params.rows) * (params.width + 2);
  const device float* maxima = partials + size_t(params.rows) * params.width + row;
  const device float* totals = maxima + params.rows;

  float maximum = params.has_sinks ? float(sinks[row / params.queries % params.heads]) * score_unit<T>() : -INFINITY;
  const float sink = maximum;
  for (uint s = lane; s < params.splits; s += 32) {
    maximum = max(maximum, maxima[s * plane]);
  }
  maximum = simd_max(maximum);
  const float base = finite_maximum(maximum);
  float total = lane == 0 ? weight_of<T>(sink - base) : 0.0f;
  for (uint s = lane; s < params.splits; s += 32) {
    total = fma(totals[s * plane], weight_of<T>(maxima[s * plane] - base), total);
  }
  total = simd_sum(total);

  for (uint d = lane; d < params.width; d += 32) {
    float sum = 0;
#pragma unroll 4
    for (uint s = simdgroup; s < params.splits; s += combine_simdgroups) {
      sum = fma(partials[s * plane + size_t(row) * params.width + d], weight_of<T>(maxima[s * plane] - base), sum);
    }
    scratch[simdgroup * params.width + d] = sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < params.width) {
    float sum = 0;
#pragma unroll
    for (int s = 0; s < combine_simdgroups; ++s) {
      sum += scratch[s * params.width + t];
    }
    y[size_t(row) * params.width + t] = T(sum / total);
  }
}

instantiate_kernel("attention_combine_float32", attention_combine, float)
instantiate_kernel("attention_combine_float16", attention_combine, half)
instantiate_kernel("attention_combine_bfloat16", attention_combine, bfloat)
