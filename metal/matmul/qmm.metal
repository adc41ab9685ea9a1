// Products of several rows of x with quantized weights by 8x8 matrices, on Apple GPUs, and in rare formats on all:
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n],   w[n, k] = scales[n, k / group] * q[n, k] + biases[n, k / group]
//
// in modes but affine without biases. matmul/matrices.h says how. Simdgroups of a threadgroup's first dimension share
// the columns, those of its second have 8 rows of x each and read the same weights at the same time.
#include <metal_stdlib>

#include "matmul/matrices.h"
#include "matmul/quantized_rows.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void qmm(
    const device T* x [[buffer(0)]],     // [batch, rows, columns]
    const device uint* w [[buffer(1)]],  // [batch, outputs, columns * bits / 32]
    const device typename QuantizedRows<T, F, 16>::Scale* scales [[buffer(2)]],  // [batch, outputs, columns / group]
    const device typename QuantizedRows<T, F, 16>::Scale* biases [[buffer(3)]],  // as scales, if any
    const device T* bias [[buffer(4)]],  // [outputs]
    device T* y [[buffer(5)]],           // [batch, rows, outputs]
    constant QuantizedParams& params [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_at [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int R = kMatrixOutputs / 8;
  using Partials = TilePartials<R, kMatrixRows / 8>;
  threadgroup float all_partials[Partials::all];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  threadgroup float* partials = all_partials + at.block * at.sharers * (Partials::rows * Partials::row);

  const uint first_output = group.x * Partials::outputs;
  const uint outputs = min(params.outputs - first_output, uint(Partials::outputs));
  const uint first_row = (group.y * threads.y + at.block) * Partials::rows;
  const size_t rows_before = size_t(group.z) * params.rows;
  const RowsOfX<T> rows =
      rows_of_block(x + rows_before * params.columns, params.rows, params.columns, first_row);
  uint lane_outputs[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    lane_outputs[r] = min(r * 8 + tile_row(lane), outputs - 1);  // the last one for those that are not there
  }

  Tile<float, R, 1> sums;
  fill(sums, 0.0f);
  const typename QuantizedRows<T, F, 16>::Source matrix[1] = {
      QuantizedRows<T, F, 16>::of(w, scales, biases, params, group.z).at(first_output, false)};
  multiply_matrices<1, R>(rows, matrix, lane_outputs, at, sums);

  leave_sums(sums, partials, at.position / 32, tile_row(lane), lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = at.position; i < Partials::rows * Partials::outputs; i += threads.x) {
    const uint m = i / Partials::outputs;
    const uint n = i % Partials::outputs;
    if (first_row + m < params.rows && n < outputs) {
      const float sum = left_sum<Partials>(partials, n, m, at.sharers);
      const uint output = first_output + n;
      y[(rows_before + first_row + m) * params.outputs + output] = T(params.has_bias ? sum + float(bias[output]) : sum);
    }
  }
}

instantiate_types("quantized_matmul_qmm_2bit", qmm, affine_2)
instantiate_types("quantized_matmul_qmm_3bit", qmm, affine_3)
instantiate_types("quantized_matmul_qmm_4bit", qmm, affine_4)
instantiate_types("quantized_matmul_qmm_5bit", qmm, affine_5)
instantiate_types("quantized_matmul_qmm_6bit", qmm, affine_6)
instantiate_types("quantized_matmul_qmm_8bit", qmm, affine_8)
instantiate_types("quantized_matmul_qmm_mxfp4", qmm, mxfp4)
instantiate_types("quantized_matmul_qmm_mxfp8", qmm, mxfp8)
instantiate_types("quantized_matmul_qmm_nvfp4", qmm, nvfp4)
