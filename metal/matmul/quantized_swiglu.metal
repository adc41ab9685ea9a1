// The gated half of a feed-forward block for 1, 2 or 4 rows of x, from affine quantized weights in one launch, on Apple
// GPUs:
//
//   y[m, n] = silu(sum_k x[m, k] * gate[n, k]) * sum_k x[m, k] * up[n, k],   silu(v) = v / (1 + exp(-v))
//
// As matmul/qmv.metal; a simdgroup has half as many outputs, of both matrices. Sums, silu and the product are in float32,
// rounded once.
#include <metal_stdlib>

#include "matmul/quantized_rows.h"
#include "matmul/rows.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, int bits, int M>
[[kernel, max_total_threads_per_threadgroup(256)]] void swiglu(
    const device T* x [[buffer(0)]],            // [rows, columns]
    const device uint* gate [[buffer(1)]],      // [outputs, columns * bits / 32]
    const device T* gate_scales [[buffer(2)]],  // [outputs, columns / group]
    const device T* gate_biases [[buffer(3)]],
    const device uint* up [[buffer(4)]],  // as gate
    const device T* up_scales [[buffer(5)]],
    const device T* up_biases [[buffer(6)]],
    device T* y [[buffer(7)]],  // [rows, outputs]
    constant QuantizedParams& params [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_at [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int R = kRowOutputs / 2;
  constexpr int C = 2 * R * M;
  threadgroup float partials[kProductSimdgroups * C];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const OwnOutputs outputs = outputs_of<R>(params.outputs, group.x * threads.y + thread_at.y);
  const uint first_row = group.y * M;
  const RowsOfX<T> rows = {x + size_t(first_row) * params.columns, params.columns, params.rows - first_row};
  const AffineRows<T, bits, run_columns(M)> matrices[2] = {
      affine_rows<bits, run_columns(M)>(gate, gate_scales, gate_biases, params, 0).at(outputs.first, outputs.alone),
      affine_rows<bits, run_columns(M)>(up, up_scales, up_biases, params, 0).at(outputs.first, outputs.alone)};

  float totals[C];
  multiply_rows<2, R, M>(rows, matrices, at, totals);
  // The upper half of the lanes has the sums of up.
  const float gated = sum_of_sharers(totals, at, partials);
  const float linear = simd_shuffle_xor(gated, ushort(16));
  const uint output = outputs.first + lane / (16 / R);
  const uint m = lane / (32 / C) % M;
  if (writes<C>(at) && lane < 16 && output >= outputs.own && (!outputs.alone || output == outputs.first) &&
      m < rows.rows) {
    y[size_t(first_row + m) * params.outputs + output] = T(gated / (1.0f + precise::exp(-gated)) * linear);
  }
}

instantiate_types("quantized_swiglu_qmv_4bit_1", swiglu, 4, 1)
instantiate_types("quantized_swiglu_qmv_4bit_2", swiglu, 4, 2)
instantiate_types("quantized_swiglu_qmv_4bit_4", swiglu, 4, 4)
instantiate_types("quantized_swiglu_qmv_8bit_1", swiglu, 8, 1)
instantiate_types("quantized_swiglu_qmv_8bit_2", swiglu, 8, 2)
instantiate_types("quantized_swiglu_qmv_8bit_4", swiglu, 8, 4)
