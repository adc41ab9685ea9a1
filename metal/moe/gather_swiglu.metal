// The gated half of chosen experts, from quantized weights in one launch:
//
//   gate[p, m, n] = sum_k x[.., m, k] * gate[.., n, k] + gate_bias[.., n], and the same of up
//   y[p, m, n] = gate * sigmoid(alpha * gate) * (up + offset), both clipped where there is a limit
//
// As moe/gather_qmm.metal; a simdgroup has half as many outputs, of both matrices. All is in float32, rounded once.
#include <metal_stdlib>

#include "matmul/quantized_rows.h"
#include "matmul/rows.h"
#include "mittens/instantiate.h"
#include "moe/pairs.h"

using namespace metal;
using namespace mittens;

// Of a sum of gate, in the lower half of the lanes; the upper half has those of up.
inline float gated_product(float sum, uint lane, constant GatherQmmParams& params) {
  // Comparisons, which leave a NaN as it is.
  sum = sum > params.limit ? params.limit : sum;
  sum = lane >= 16 && sum < -params.limit ? -params.limit : sum;
  const float linear = simd_shuffle_xor(sum, ushort(16)) + params.offset;
  return sum / (1.0f + precise::exp(-params.alpha * sum)) * linear;
}

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void gather_swiglu(
    const device T* x [[buffer(0)]],        // [inputs, rows, columns]
    const device uint* gate [[buffer(1)]],  // [matrices, outputs, columns * bits / 32]
    const device typename QuantizedRows<T, F, 8>::Scale* gate_scales [[buffer(2)]],  // [.., columns / group]
    const device typename QuantizedRows<T, F, 8>::Scale* gate_biases [[buffer(3)]],  // as scales, if any
    const device uint* up [[buffer(4)]],                                                         // as gate
    const device typename QuantizedRows<T, F, 8>::Scale* up_scales [[buffer(5)]],
    const device typename QuantizedRows<T, F, 8>::Scale* up_biases [[buffer(6)]],
    const device T* gate_bias [[buffer(7)]],    // [matrices, outputs]
    const device T* up_bias [[buffer(8)]],      // [matrices, outputs]
    const device uint* matrices [[buffer(9)]],  // [pairs]
    const device uint* inputs [[buffer(10)]],   // [pairs]
    device T* y [[buffer(11)]],                 // [pairs, rows, outputs]
    constant GatherQmmParams& params [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_at [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
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
    float addend = 0;
    if (params.weights.has_bias && at.position < C) {
      const uint output = outputs.first + (outputs.alone ? 0 : at.position % R);
      const device T* bias = at.position < R ? gate_bias : up_bias;
      addend = float(bias[size_t(pair.matrix) * params.weights.outputs + output]);
    }
    float totals[C];
    multiply_rows<2, R, 1>(rows, both, at, totals);
#pragma unroll
    for (int i = 0; i < C; ++i) {
      totals[i] += int(at.position) == i ? addend : 0.0f;
    }
    // The upper half of the lanes has the sums of up.
    gated = gated_product(sum_of_sharers(totals, at, partials), lane, params);
  }
  const uint output = outputs.first + lane / (16 / R);
  if (writes<C>(at) && lane < 16 && output >= outputs.own && (!outputs.alone || output == outputs.first)) {
    y[(size_t(group.z) * params.weights.rows + group.y) * params.weights.outputs + output] = T(gated);
  }
}

template <typename T, int M, typename Source>
inline void multiply_shared(
    const device T* x, thread const Source (&both)[2], const device T* gate_bias, const device T* up_bias,
    const device uint* matrices, const device uint* inputs, device T* y, constant GatherQmmParams& params,
    SharedPairs shared, OwnOutputs outputs, Sharing at, uint row, threadgroup float* partials) {
  constexpr int R = kRowOutputs / 2;
  constexpr int C = 2 * R * M;
  RowsOfPairs<T, M> rows;
  const OwnRow own = rows_of_pairs<T, M>(x, matrices, inputs, params, shared, row, at.lane / (32 / C) % M, rows);
  float totals[C];
  multiply_rows<2, R, M>(rows, both, at, totals);
  // The upper half of the lanes has the sums of up.
  float sum = sum_of_sharers(totals, at, partials);
  const uint output = outputs.first + at.lane / (16 / R) % R;
  if (params.weights.has_bias) {
    sum += float((at.lane < 16 ? gate_bias : up_bias)[outputs.alone ? outputs.first : output]);
  }
  const float gated = gated_product(sum, at.lane, params);
  if (writes<C>(at) && at.lane < 16 && output >= outputs.own && (!outputs.alone || output == outputs.first) &&
      own.is_own) {
    y[own.row * params.weights.outputs + output] = T(own.is_valid ? gated : not_a_number());
  }
}

// The same where several pairs have the same matrices: of up to kMostShared such pairs, one threadgroup reads these. A
// pair gives the same whichever it shares with.
template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void gather_swiglu_shared(
    const device T* x [[buffer(0)]],        // as of gather_swiglu, from here on
    const device uint* gate [[buffer(1)]],
    const device typename QuantizedRows<T, F, 8>::Scale* gate_scales [[buffer(2)]],
    const device typename QuantizedRows<T, F, 8>::Scale* gate_biases [[buffer(3)]],
    const device uint* up [[buffer(4)]],
    const device typename QuantizedRows<T, F, 8>::Scale* up_scales [[buffer(5)]],
    const device typename QuantizedRows<T, F, 8>::Scale* up_biases [[buffer(6)]],
    const device T* gate_bias [[buffer(7)]],
    const device T* up_bias [[buffer(8)]],
    const device uint* matrices [[buffer(9)]],
    const device uint* inputs [[buffer(10)]],
    device T* y [[buffer(11)]],
    constant GatherQmmParams& params [[buffer(12)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_at [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Rows = QuantizedRows<T, F, 8>;
  constexpr int R = kRowOutputs / 2;
  threadgroup float partials[kProductSimdgroups * 2 * R * kMostShared];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const OwnOutputs outputs = outputs_of<R>(params.weights.outputs, group.x * threads.y + thread_at.y);
  const SharedPairs shared = shared_pairs(matrices, params.weights.matrices, group.z, lane);
  if (shared.count == 0) {
    return;
  }
  // One that is out of range gives NaN, whichever matrices are read.
  const uint index = min(matrices[group.z], params.pairs.matrices - 1);
  const typename Rows::Source both[2] = {
      Rows::of(gate, gate_scales, gate_biases, params.weights, index).at(outputs.first, outputs.alone),
      Rows::of(up, up_scales, up_biases, params.weights, index).at(outputs.first, outputs.alone)};
  const size_t first_bias = params.weights.has_bias ? size_t(index) * params.weights.outputs : 0;
  gate_bias += first_bias;
  up_bias += first_bias;
  if (shared.count == 1) {
    multiply_shared<T, 1>(
        x, both, gate_bias, up_bias, matrices, inputs, y, params, shared, outputs, at, group.y, partials);
  } else if (shared.count == 2) {
    multiply_shared<T, 2>(
        x, both, gate_bias, up_bias, matrices, inputs, y, params, shared, outputs, at, group.y, partials);
  } else {
    multiply_shared<T, 4>(
        x, both, gate_bias, up_bias, matrices, inputs, y, params, shared, outputs, at, group.y, partials);
  }
}

instantiate_types("gather_swiglu_shared_4bit", gather_swiglu_shared, affine_4)
instantiate_types("gather_swiglu_shared_8bit", gather_swiglu_shared, affine_8)
instantiate_types("gather_swiglu_shared_mxfp4", gather_swiglu_shared, mxfp4)

instantiate_types("gather_swiglu_2bit", gather_swiglu, affine_2)
instantiate_types("gather_swiglu_3bit", gather_swiglu, affine_3)
instantiate_types("gather_swiglu_4bit", gather_swiglu, affine_4)
instantiate_types("gather_swiglu_5bit", gather_swiglu, affine_5)
instantiate_types("gather_swiglu_6bit", gather_swiglu, affine_6)
instantiate_types("gather_swiglu_8bit", gather_swiglu, affine_8)
instantiate_types("gather_swiglu_mxfp4", gather_swiglu, mxfp4)
instantiate_types("gather_swiglu_mxfp8", gather_swiglu, mxfp8)
instantiate_types("gather_swiglu_nvfp4", gather_swiglu, nvfp4)
