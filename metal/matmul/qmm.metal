// Products of several rows of x with quantized weights by 8x8 matrices, on Apple GPUs, and in rare formats on all:
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n],   w[n, k] = scales[n, k / group] * q[n, k] + biases[n, k / group]
//
// in modes but affine without biases. matmul/matrices.h says how. Simdgroups of a threadgroup's first dimension share
// the columns; along its second each has 8 rows of x, and reads the same weights at the same time.
#include <metal_stdlib>

#include "matmul/matrices.h"
#include "matmul/quantized_rows.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void qmm(
    const device T* x [[buffer(0)]],              // [batch, rows, columns]
    quantized_matrix(w, 1, 2, 3, ScaleOf<T, F>),  // [batch, outputs, columns]
    const device T* bias [[buffer(4)]],           // [outputs]
    device T* y [[buffer(5)]],                    // [batch, rows, outputs]
    constant QuantizedParams& params [[buffer(6)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, 16>;
  threadgroup float partials[MatrixPartials::all];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const uint first_row = (group.y * threads.y + at.block) * kMatrixRows;
  const size_t rows_before = size_t(group.z) * params.rows;
  const typename Rows::Source matrix[1] = {Rows::of(w, w_scales, w_biases, params, group.z)};
  multiply_by_matrices(
      x + rows_before * params.columns, matrix, bias, y, rows_before, first_row, group.x * kMatrixOutputs, params, at,
      threads.x, partials);
}

instantiate_formats("quantized_matmul_qmm", "", qmm)
