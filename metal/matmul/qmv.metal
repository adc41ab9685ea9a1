// Products of 1, 2 or 4 rows of x with quantized weights, on Apple GPUs, and of one row in rare formats on all:
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n],   w[n, k] = scales[n, k / group] * q[n, k] + biases[n, k / group]
//
// in modes but affine without biases. matmul/rows.h says how: a simdgroup has kRowOutputs outputs. Simdgroups of a
// threadgroup's first dimension share the columns, those of its second have outputs of their own.
#include <metal_stdlib>

#include "matmul/quantized_rows.h"
#include "matmul/rows.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, QuantizedFormat F, int M>
[[kernel, max_total_threads_per_threadgroup(256)]] void qmv(
    const device T* x [[buffer(0)]],     // [batch, rows, columns]
    const device uint* w [[buffer(1)]],  // [batch, outputs, columns * bits / 32]
    const device typename QuantizedRows<T, F, run_columns(M)>::Scale* scales [[buffer(2)]],  // [.., columns / group]
    const device typename QuantizedRows<T, F, run_columns(M)>::Scale* biases [[buffer(3)]],  // as scales, if any
    const device T* bias [[buffer(4)]],  // [outputs]
    device T* y [[buffer(5)]],           // [batch, rows, outputs]
    constant QuantizedParams& params [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_at [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  using Rows = QuantizedRows<T, F, run_columns(M)>;
  constexpr int R = kRowOutputs;
  constexpr int C = R * M;
  threadgroup float partials[kProductSimdgroups * C];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const OwnOutputs outputs = outputs_of<R>(params.outputs, group.x * threads.y + thread_at.y);
  const uint first_row = group.y * M;
  const size_t rows_before = size_t(group.z) * params.rows + first_row;
  const RowsOfX<T> rows = {x + rows_before * params.columns, params.columns, params.rows - first_row};
  const typename Rows::Source matrix[1] = {
      Rows::of(w, scales, biases, params, group.z).at(outputs.first, outputs.alone)};

  float totals[C];
  multiply_rows<1, R, M>(rows, matrix, at, totals);
  const float sum = sum_of_sharers(totals, at, partials);
  const uint output = outputs.first + lane / (32 / R);
  const uint m = lane / (32 / C) % M;
  if (writes<C>(at) && output >= outputs.own && (!outputs.alone || output == outputs.first) && m < rows.rows) {
    y[(rows_before + m) * params.outputs + output] = T(params.has_bias ? sum + float(bias[output]) : sum);
  }
}

instantiate_types("quantized_matmul_qmv_4bit_1", qmv, affine_4, 1)
instantiate_types("quantized_matmul_qmv_4bit_2", qmv, affine_4, 2)
instantiate_types("quantized_matmul_qmv_4bit_4", qmv, affine_4, 4)
instantiate_types("quantized_matmul_qmv_8bit_1", qmv, affine_8, 1)
instantiate_types("quantized_matmul_qmv_8bit_2", qmv, affine_8, 2)
instantiate_types("quantized_matmul_qmv_8bit_4", qmv, affine_8, 4)

// Rare formats: several rows go by matrices (matmul/qmm.metal).
instantiate_types("quantized_matmul_qmv_2bit_1", qmv, affine_2, 1)
instantiate_types("quantized_matmul_qmv_3bit_1", qmv, affine_3, 1)
instantiate_types("quantized_matmul_qmv_5bit_1", qmv, affine_5, 1)
instantiate_types("quantized_matmul_qmv_6bit_1", qmv, affine_6, 1)
instantiate_types("quantized_matmul_qmv_mxfp4_1", qmv, mxfp4, 1)
instantiate_types("quantized_matmul_qmv_mxfp8_1", qmv, mxfp8, 1)
instantiate_types("quantized_matmul_qmv_nvfp4_1", qmv, nvfp4, 1)
