// The gated half of chosen experts, from affine quantized weights in one launch:
//
//   y[p, m, n] = silu(sum_k x[.., m, k] * gate[.., n, k]) * sum_k x[.., m, k] * up[.., n, k]
//
// As moe/gather_qmm.metal; a simdgroup has half as many outputs, of both matrices. Sums, silu and the product are in
// float32, rounded once.
#include <metal_stdlib>

#include "matmul/quantized_rows.h"
#include "matmul/rows.h"
#include "mittens/instantiate.h"
#include "moe/pairs.h"

using namespace metal;
using namespace mittens;

template <typename T, int bits>
[[kernel, max_total_threads_per_threadgroup(256)]] void gather_swiglu(
    const device T* x [[buffer(0)]],            // [inputs, rows, columns]
    const device uint* gate [[buffer(1)]],      // [matrices, outputs, columns * bits / 32]
    const device T* gate_scales [[buffer(2)]],  // [matrices, outputs, columns / group]
    const device T* gate_biases [[buffer(3)]],
    const device uint* up [[buffer(4)]],  // as gate
    const device T* up_scales [[buffer(5)]],
    const device T* up_biases [[buffer(6)]],
    const device uint* matrices [[buffer(7)]],  // [pairs]
    const device uint* inputs [[buffer(8)]],    // [pairs]
    device T* y [[buffer(9)]],                  // [pairs, rows, outputs]
    constant GatherQmmParams& params [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_at [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int R = kRowOutputs / 2;
  constexpr int C = 2 * R;
  threadgroup float partials[kProductSimdgroups * C];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const OwnOutputs outputs = outputs_of<R>(params.weights.outputs, group.x * threads.y + thread_at.y);
  const Pair pair = pair_of(matrices, inputs, params.pairs, group.z);
  float gated = not_a_number();
  if (pair.is_valid) {
    const size_t row = size_t(pair.input) * params.weights.rows + group.y;
    const RowsOfX<T> rows = {x + row * params.weights.columns, params.weights.columns, 1};
    const AffineRows<T, bits, run_columns(1)> both[2] = {
        affine_rows<bits, run_columns(1)>(gate, gate_scales, gate_biases, params.weights, pair.matrix)
            .at(outputs.first, outputs.alone),
        affine_rows<bits, run_columns(1)>(up, up_scales, up_biases, params.weights, pair.matrix)
            .at(outputs.first, outputs.alone)};
    float totals[C];
    multiply_rows<2, R, 1>(rows, both, at, totals);
    // The upper half of the lanes has the sums of up.
    gated = sum_of_sharers(totals, at, partials);
    const float linear = simd_shuffle_xor(gated, ushort(16));
    gated = gated / (1.0f + precise::exp(-gated)) * linear;
  }
  const uint output = outputs.first + lane / (16 / R);
  if (writes<C>(at) && lane < 16 && output >= outputs.own && (!outputs.alone || output == outputs.first)) {
    y[(size_t(group.z) * params.weights.rows + group.y) * params.weights.outputs + output] = T(gated);
  }
}

instantiate_types("gather_swiglu_4bit", gather_swiglu, 4)
instantiate_types("gather_swiglu_8bit", gather_swiglu, 8)
