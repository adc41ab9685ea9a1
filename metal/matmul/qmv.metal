// Products of 1, 2, 4 or 8 rows of x with quantized weights, on Apple GPUs, and of one row in rare formats on all:
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n],   w[n, k] = scales[n, k / group] * q[n, k] + biases[n, k / group]
//
// in modes but affine without biases. matmul/row_products.h says how: a simdgroup has kRowOutputs outputs. Simdgroups
// of a threadgroup's first dimension share the columns; along its second they have outputs of their own. qmv_sum adds
// the product of one row to a residual, for a norm of the sum (matmul/normed_row.h).
#include <metal_stdlib>

#include "matmul/normed_row.h"
#include "matmul/quantized_rows.h"
#include "matmul/row_products.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, QuantizedFormat F, int M>
[[kernel, max_total_threads_per_threadgroup(256)]] void qmv(
    const device T* x [[buffer(0)]],              // [batch, rows, columns]
    quantized_matrix(w, 1, 2, 3, ScaleOf<T, F>),  // [batch, outputs, columns]
    const device T* bias [[buffer(4)]],           // [outputs]
    device T* y [[buffer(5)]],                    // [batch, rows, outputs]
    constant QuantizedParams& params [[buffer(6)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, kRunColumns>;
  constexpr int R = row_outputs(M, sizeof(T));
  threadgroup float partials[kProductSimdgroups * R * M];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const uint first_row = group.y * M;
  const size_t rows_before = size_t(group.z) * params.rows + first_row;
  const RowsOfX<T> rows = {x + rows_before * params.columns, params.columns, params.rows - first_row};
  const typename Rows::Source matrix[1] = {Rows::of(w, w_scales, w_biases, params, group.z)};
  multiply_by_rows<M, R>(rows, matrix, bias, y, rows_before, group.x * threads.y + thread_at.y, params, at, partials);
}

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void qmv_sum(
    const device T* x [[buffer(0)]],              // [columns]
    quantized_matrix(w, 1, 2, 3, ScaleOf<T, F>),  // [outputs, columns]
    const device T* bias [[buffer(4)]],           // [outputs]
    const device T* residual [[buffer(5)]],       // [outputs]
    const device T* norm_weight [[buffer(6)]],    // [outputs]
    device T* sum [[buffer(7)]],                  // [outputs]
    device float* scaled [[buffer(8)]],           // [outputs], sum * norm_weight
    device float* squares [[buffer(9)]],          // [blocks], of the sum
    constant QuantizedParams& params [[buffer(10)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, kRunColumns>;
  constexpr int R = kRowOutputs;
  threadgroup float partials[kProductSimdgroups * R];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const uint block = group.x * threads.y + thread_at.y;
  const OwnOutputs outputs = outputs_of<R>(params.outputs, block);
  const RowsOfX<T> rows = {x, params.columns, 1};
  const typename Rows::Source matrix[1] = {Rows::of(w, w_scales, w_biases, params, 0).at(outputs.first, outputs.alone)};
  float totals[R];
  dot_rows<1, R, 1>(rows, matrix, at, totals);
  const float product[1] = {sum_of_sharers(totals, at, partials)};
  const uint output = min(outputs.first + lane / (32 / R), params.outputs - 1);
  const SummedRow<T> row = {residual, norm_weight, sum, scaled, squares};
  write_sums<R>(row, epilogue(product, bias, params, output), at, outputs, block, params.outputs);
}

instantiate_formats("quantized_matmul_qmv", "_1", qmv, 1)
// Of common formats: several rows of the others go by matrices (matmul/qmm.metal).
instantiate_several("quantized_matmul_qmv", qmv)
instantiate_common("quantized_matmul_sum", qmv_sum)
