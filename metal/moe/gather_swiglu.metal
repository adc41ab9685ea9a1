// The gated half of chosen experts, from quantized weights in one launch:
//
//   gate[p, m, n] = sum_k x[.., m, k] * gate[.., n, k] + gate_bias[.., n], and the same of up
//   y[p, m, n] = gate * sigmoid(gate * (alpha + beta * gate^2)) * (up + offset), both clipped where there is a limit
//
// As moe/gather_qmm.metal; a simdgroup has half as many outputs, of both matrices. All is in float32, rounded once.
#include <metal_stdlib>

#include "matmul/quantized_rows.h"
#include "matmul/row_products.h"
#include "mittens/instantiate.h"
#include "moe/shared_pairs.h"

using namespace metal;
using namespace mittens;

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void gather_swiglu(
    const device T* x [[buffer(0)]],                 // [inputs, rows, columns]
    quantized_matrix(gate, 1, 2, 3, ScaleOf<T, F>),  // [matrices, outputs, columns]
    quantized_matrix(up, 4, 5, 6, ScaleOf<T, F>),    // as gate
    const device T* gate_bias [[buffer(7)]],         // [matrices, outputs]
    const device T* up_bias [[buffer(8)]],           // [matrices, outputs]
    const device uint* matrices [[buffer(9)]],       // [pairs]
    const device uint* inputs [[buffer(10)]],        // [pairs]
    device T* y [[buffer(11)]],                      // [pairs, rows, outputs]
    constant GatherQmmParams& params [[buffer(12)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, 8>;
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
    const typename Rows::Source both[2] = {
        Rows::of(gate, gate_scales, gate_biases, params.weights, pair.matrix).at(outputs.first, outputs.alone),
        Rows::of(up, up_scales, up_biases, params.weights, pair.matrix).at(outputs.first, outputs.alone)};
    const float addend = gated_addend<R>(gate_bias, up_bias, pair.matrix, true, params.weights, outputs, at.position);
    float totals[C];
    dot_rows<2, R, 1>(rows, both, at, totals);
#pragma unroll
    for (int i = 0; i < C; ++i) {
      totals[i] += int(at.position) == i ? addend : 0.0f;
    }
    // The upper half of the lanes has the sums of up.
    gated = gated_product(sum_of_sharers(totals, at, partials), lane, params);
  }
  const uint output = outputs.first + lane / (16 / R);
  if (writes<C>(at, outputs, output) && lane < 16) {
    y[(size_t(group.z) * params.weights.rows + group.y) * params.weights.outputs + output] = T(gated);
  }
}

// The same where several pairs have the same matrices (moe/shared_pairs.h).
template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void gather_swiglu_shared(
    const device T* x [[buffer(0)]],                 // as of gather_swiglu, from here on
    quantized_matrix(gate, 1, 2, 3, ScaleOf<T, F>),  // [matrices, outputs, columns]
    quantized_matrix(up, 4, 5, 6, ScaleOf<T, F>),    // as gate
    const device T* gate_bias [[buffer(7)]], const device T* up_bias [[buffer(8)]],
    const device uint* matrices [[buffer(9)]], const device uint* inputs [[buffer(10)]], device T* y [[buffer(11)]],
    constant GatherQmmParams& params [[buffer(12)]], thread_of_plane) {
  threadgroup float partials[kProductSimdgroups * kRowOutputs * kMostShared];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const SharedPairs shared = shared_pairs(matrices, params.weights.matrices, group.z, lane);
  if (shared.count == 0) {
    return;
  }
  // One that is out of range gives NaN, whichever matrix is read.
  const uint index = min(matrices[group.z], params.pairs.matrices - 1);
  using Rows = QuantizedRows<T, F, 8>;
  const typename Rows::Source both[2] = {
      Rows::of(gate, gate_scales, gate_biases, params.weights, index),
      Rows::of(up, up_scales, up_biases, params.weights, index)};
  SharedOperands<T, 2> of = {x, {gate_bias, up_bias}, matrices, inputs, y, group.y};
  multiply_shared_pairs(of, both, index, params, shared, group.x * threads.y + thread_at.y, at, partials);
}

instantiate_common("gather_swiglu_shared", gather_swiglu_shared)
instantiate_formats("gather_swiglu", "", gather_swiglu)
