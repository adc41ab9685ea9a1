// The product of one row of x with rows of weights so short that a simdgroup has a whole one on its way at once:
//
//   y[n] = sum_k x[k] * w[n, k] + b[n]
//
// On NVIDIA GPUs (short_loads in csrc/ops/matmul/plan.cpp): a product this small takes little more than its wait for
// memory, so that nothing may wait twice, neither for columns that are asked for later nor for another simdgroup. Loads
// stand in branches of their own, since ptxas leaves them together there; in one straight line it has the first product
// wait for some loads before it asks for the others, to save registers. On an H200 1024 to 3072 in bfloat16 takes 3.2
// us; 3.5 that way, 3.6 with the simdgroups that share rows of matmul/gemv.metal.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/pack.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

// S: packs a lane, which cover a row.
template <typename T, int S>
[[kernel, max_total_threads_per_threadgroup(32 * kShortSimdgroups)]] void gemv_short(
    const device T* x [[buffer(0)]],     // [columns]
    const device T* w [[buffer(1)]],     // [outputs, columns]
    const device T* bias [[buffer(2)]],  // [outputs]
    device T* y [[buffer(3)]],           // [outputs]
    constant GemvShortParams& params [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_at [[thread_position_in_threadgroup]]) {
  constexpr int W = pack_size<T>();
  constexpr int step = 32 * W;
  const uint lane = thread_at.x;
  const uint output = group.x * kShortSimdgroups + thread_at.y;
  if (output >= params.outputs) {
    return;
  }
  x += lane * W;
  w += size_t(output) * params.weight_stride + lane * W;

  uint4 activations[S];
  uint4 weights[S];
  if (params.columns == S * step) {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      activations[s] = load_pack(x + s * step, true);
      weights[s] = load_pack(w + s * step, true);
    }
  } else {
#pragma unroll
    for (int s = 0; s < S; ++s) {
      activations[s] = uint4(0);
      weights[s] = uint4(0);
      if (s * step + lane * W < params.columns) {
        activations[s] = load_pack(x + s * step, true);
        weights[s] = load_pack(w + s * step, true);
      }
    }
  }

  float total = 0;
#pragma unroll
  for (int s = 0; s < S; ++s) {
    float v[W];
    float u[W];
    unpack<T>(activations[s], v);
    unpack<T>(weights[s], u);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      total += v[i] * u[i];
    }
  }
  total = simd_sum(total);
  if (lane == 0) {
    y[output] = T(params.has_bias ? total + float(bias[output]) : total);
  }
}

instantiate_types("gemv_short_4", gemv_short, 4)
instantiate_types("gemv_short_5", gemv_short, 5)
instantiate_types("gemv_short_8", gemv_short, 8)
