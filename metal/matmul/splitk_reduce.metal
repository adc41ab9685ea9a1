// The last step of products that several threadgroups share (matmul/splitk.h):
//
//   y[m, n] = sum_s sums[s, m, n] + bias[n]
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void split_sum(
    const device float* sums [[buffer(0)]],  // [splits, rows, outputs]
    const device T* bias [[buffer(1)]],      // [outputs]
    device T* y [[buffer(2)]],               // [rows, outputs]
    constant SplitSumParams& params [[buffer(3)]], uint index [[thread_position_in_grid]]) {
  const uint plane = params.rows * params.outputs;
  if (index < plane) {
    float sum = 0;
    for (uint s = 0; s < params.splits; ++s) {
      sum += sums[size_t(s) * plane + index];
    }
    y[index] = T(params.has_bias ? sum + float(bias[index % params.outputs]) : sum);
  }
}

instantiate_kernel("split_sum_float32", split_sum, float)
instantiate_kernel("split_sum_float16", split_sum, half)
instantiate_kernel("split_sum_bfloat16", split_sum, bfloat)
