// Products of 1, 2 or 4 rows of x with affine quantized weights, on Apple GPUs:
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n],   w[n, k] = scales[n, k / group] * q[n, k] + biases[n, k / group]
//
// matmul/rows.h says how: a simdgroup has kRowOutputs outputs. Those of a threadgroup's first dimension share the columns, those of
// its second have outputs of their own.
#include <metal_stdlib>

#include "matmul/affine_rows.h"
#include "matmul/rows.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, int bits, int M>
[[kernel, max_total_threads_per_threadgroup(256)]] void qmv(
    const device T* x [[buffer(0)]],       // [batch, rows, columns]
    const device uint* w [[buffer(1)]],    // [batch, outputs, columns * bits / 32]
    const device T* scales [[buffer(2)]],  // [batch, outputs, columns / group]
    const device T* biases [[buffer(3)]],  // [batch, outputs, columns / group]
    const device T* bias [[buffer(4)]],    // [outputs]
    device T* y [[buffer(5)]],             // [batch, rows, outputs]
    constant QuantizedParams& params [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_at [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int R = kRowOutputs;
  constexpr int C = R * M;
  threadgroup float partials[kProductSimdgroups * C];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const OwnOutputs outputs = outputs_of<R>(params.outputs, group.x * threads.y + thread_at.y);
  const uint first_row = group.y * M;
  const size_t rows_before = size_t(group.z) * params.rows + first_row;
  const RowsOfX<T> rows = {x + rows_before * params.columns, params.columns, params.rows - first_row};
  const AffineRows<T, bits, run_columns(M)> matrix[1] = {
      affine_rows<bits, run_columns(M)>(w, scales, biases, params, group.z).at(outputs.first, outputs.alone)};

  float totals[C];
  multiply_rows<1, R, M>(rows, matrix, at, totals);
  const float sum = sum_of_sharers(totals, at, partials);
  const uint output = outputs.first + lane / (32 / R);
  const uint m = lane / (32 / C) % M;
  if (writes<C>(at) && output >= outputs.own && (!outputs.alone || output == outputs.first) && m < rows.rows) {
    y[(rows_before + m) * params.outputs + output] = T(params.has_bias ? sum + float(bias[output]) : sum);
  }
}

instantiate_types("quantized_matmul_qmv_4bit_1", qmv, 4, 1)
instantiate_types("quantized_matmul_qmv_4bit_2", qmv, 4, 2)
instantiate_types("quantized_matmul_qmv_4bit_4", qmv, 4, 4)
instantiate_types("quantized_matmul_qmv_8bit_1", qmv, 8, 1)
instantiate_types("quantized_matmul_qmv_8bit_2", qmv, 8, 2)
instantiate_types("quantized_matmul_qmv_8bit_4", qmv, 8, 4)
