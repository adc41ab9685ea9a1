// The gated half of a feed-forward block, from quantized weights in one launch, on Apple GPUs, and in rare formats on all:
//
//   y[m, n] = silu(sum_k x[m, k] * gate[n, k]) * sum_k x[m, k] * up[n, k],   silu(v) = v / (1 + exp(-v))
//
// One row of x or two as matmul/qmv.metal, more as matmul/qmm.metal; a simdgroup has half as many outputs, of both matrices.
// Sums, silu and the product are in float32, rounded once.
#include <metal_stdlib>

#include "matmul/matrices.h"
#include "matmul/quantized_rows.h"
#include "matmul/rows.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

inline float gated_product(float gate, float up) {
  return gate / (1.0f + precise::exp(-gate)) * up;
}

template <typename T, QuantizedFormat F, int M>
[[kernel, max_total_threads_per_threadgroup(256)]] void swiglu_by_rows(
    const device T* x [[buffer(0)]],        // [rows, columns]
    const device uint* gate [[buffer(1)]],  // [outputs, columns * bits / 32]
    const device typename QuantizedRows<T, F, 16>::Scale* gate_scales [[buffer(2)]],  // [outputs, columns / group]
    const device typename QuantizedRows<T, F, 16>::Scale* gate_biases [[buffer(3)]],  // as scales, if any
    const device uint* up [[buffer(4)]],                                              // as gate
    const device typename QuantizedRows<T, F, 16>::Scale* up_scales [[buffer(5)]],
    const device typename QuantizedRows<T, F, 16>::Scale* up_biases [[buffer(6)]],
    device T* y [[buffer(7)]],  // [rows, outputs]
    constant QuantizedParams& params [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_at [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Rows = QuantizedRows<T, F, 16>;
  constexpr int R = kRowOutputs / 2;
  constexpr int C = 2 * R * M;
  threadgroup float partials[kProductSimdgroups * C];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const OwnOutputs outputs = outputs_of<R>(params.outputs, group.x * threads.y + thread_at.y);
  const uint first_row = group.y * M;
  const RowsOfX<T> rows = {x + size_t(first_row) * params.columns, params.columns, params.rows - first_row};
  const typename Rows::Source matrices[2] = {
      Rows::of(gate, gate_scales, gate_biases, params, 0).at(outputs.first, outputs.alone),
      Rows::of(up, up_scales, up_biases, params, 0).at(outputs.first, outputs.alone)};

  float totals[C];
  multiply_rows<2, R, M>(rows, matrices, at, totals);
  // The upper half of the lanes has the sums of up.
  const float gated = sum_of_sharers(totals, at, partials);
  const float linear = simd_shuffle_xor(gated, ushort(16));
  const uint output = outputs.first + lane / (16 / R);
  const uint m = lane / (32 / C) % M;
  if (writes<C>(at) && lane < 16 && output >= outputs.own && (!outputs.alone || output == outputs.first) &&
      m < rows.rows) {
    y[size_t(first_row + m) * params.outputs + output] = T(gated_product(gated, linear));
  }
}

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void swiglu_by_matrices(
    const device T* x [[buffer(0)]],        // [rows, columns]
    const device uint* gate [[buffer(1)]],  // [outputs, columns * bits / 32]
    const device typename QuantizedRows<T, F, 16>::Scale* gate_scales [[buffer(2)]],  // [outputs, columns / group]
    const device typename QuantizedRows<T, F, 16>::Scale* gate_biases [[buffer(3)]],  // as scales, if any
    const device uint* up [[buffer(4)]],                                              // as gate
    const device typename QuantizedRows<T, F, 16>::Scale* up_scales [[buffer(5)]],
    const device typename QuantizedRows<T, F, 16>::Scale* up_biases [[buffer(6)]],
    device T* y [[buffer(7)]],  // [rows, outputs]
    constant QuantizedParams& params [[buffer(8)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_at [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Rows = QuantizedRows<T, F, 16>;
  constexpr int R = kMatrixOutputs / 16;
  using Partials = TilePartials<2 * R, 1>;
  constexpr uint own_outputs = R * 8;
  threadgroup float all_partials[Partials::all];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  threadgroup float* partials = all_partials + at.block * at.sharers * (Partials::rows * Partials::row);

  const uint first_output = group.x * own_outputs;
  const uint outputs = min(params.outputs - first_output, own_outputs);
  const uint first_row = (group.y * threads.y + at.block) * Partials::rows;
  const RowsOfX<T> rows = rows_of_block(x, params.rows, params.columns, first_row);
  uint lane_outputs[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    lane_outputs[r] = min(r * 8 + tile_row(lane), outputs - 1);  // the last one for those that are not there
  }
  const typename Rows::Source matrices[2] = {
      Rows::of(gate, gate_scales, gate_biases, params, 0).at(first_output, false),
      Rows::of(up, up_scales, up_biases, params, 0).at(first_output, false)};

  Tile<float, 2 * R, 1> sums;
  fill(sums, 0.0f);
  multiply_matrices<2, R>(rows, matrices, lane_outputs, at, sums);

  leave_sums(sums, partials, at.position / 32, tile_row(lane), lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = at.position; i < Partials::rows * own_outputs; i += threads.x) {
    const uint m = i / own_outputs;
    const uint n = i % own_outputs;
    if (first_row + m < params.rows && n < outputs) {
      const float gated = left_sum<Partials>(partials, n, m, at.sharers);
      const float linear = left_sum<Partials>(partials, own_outputs + n, m, at.sharers);
      y[size_t(first_row + m) * params.outputs + first_output + n] = T(gated_product(gated, linear));
    }
  }
}

#define instantiate_swiglu(name, format)                                       \
  instantiate_types("quantized_swiglu_qmv_" #name "_1", swiglu_by_rows, format, 1) \
  instantiate_types("quantized_swiglu_qmm_" #name, swiglu_by_matrices, format)

instantiate_types("quantized_swiglu_qmv_4bit_2", swiglu_by_rows, affine_4, 2)
instantiate_types("quantized_swiglu_qmv_8bit_2", swiglu_by_rows, affine_8, 2)

instantiate_swiglu(2bit, affine_2)
instantiate_swiglu(3bit, affine_3)
instantiate_swiglu(4bit, affine_4)
instantiate_swiglu(5bit, affine_5)
instantiate_swiglu(6bit, affine_6)
instantiate_swiglu(8bit, affine_8)
instantiate_swiglu(mxfp4, mxfp4)
instantiate_swiglu(mxfp8, mxfp8)
instantiate_swiglu(nvfp4, nvfp4)
