// Products of a few rows of x with quantized weights that are packed along the outputs, by 8x8 matrices, on Apple GPUs,
// and in rare formats on all:
//
//   y[m, n] = sum_k x[m, k] * w[k, n] + b[n],   w[k, n] = scales[k, n / group] * q[k, n] + biases[k, n / group]
//
// in modes but affine without biases. matmul/matrices.h says how. A simdgroup has 64 outputs of 8 rows of x. Simdgroups
// of a threadgroup's first dimension share the rows of weights; along its second they have outputs of their own.
// Threadgroups may share the rows too, and then leave partial sums for matmul/splitk_reduce.metal.
#include <metal_stdlib>

#include "matmul/matrices.h"
#include "matmul/quantized_rows.h"
#include "matmul/splitk.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void qvm(
    const device T* x [[buffer(0)]],              // [batch, rows, columns]
    quantized_matrix(w, 1, 2, 3, ScaleOf<T, F>),  // [batch, columns, outputs]
    const device T* bias [[buffer(4)]],           // [outputs]
    device T* y [[buffer(5)]],                    // [batch, rows, outputs], or float [splits, batch, rows, outputs]
    constant QuantizedParams& params [[buffer(6)]], thread_of_plane) {
  constexpr uint outputs = kTransposedOutputs;
  constexpr int C = outputs / 8;
  constexpr uint step = kTransposedStep;
  threadgroup float all_partials[kProductSimdgroups * 8 * outputs];
  const uint sharers = threads.x / 32;
  const uint sharer = thread_at.x / 32;
  threadgroup float* partials = all_partials + thread_at.y * sharers * (8 * outputs);

  const uint split = group.y % params.splits;
  const uint first_row = group.y / params.splits * 8;
  const size_t rows_before = size_t(group.z) * params.rows;
  const RowsOfX<T> rows = rows_of_block(x + rows_before * params.columns, params.rows, params.columns, first_row);
  const uint first_output = (group.x * threads.y + thread_at.y) * outputs;
  const uint quarter = tile_column(lane) / 2 * 16;
  const bool is_there = first_output + quarter < params.outputs;
  const uint begin = split * params.columns_per_split + sharer * step;
  const uint end = min(split * params.columns_per_split + params.columns_per_split, params.columns);

  Tile<float, 1, C> sums;
  fill(sums, 0.0f);
  if (first_output < params.outputs) {
    multiply_transposed(
        rows, QuantizedRows<T, F, 16>::of(w, w_scales, w_biases, params, group.z),
        is_there ? first_output + quarter : 0, begin, end, sharers * step, lane, sums);
  }
#pragma unroll
  for (int u = 0; u < C; ++u) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      partials[(sharer * 8 + tile_row(lane)) * outputs + quarter + u + i * C] = sums.at[0][u][i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const SplitPlace place{
      split, params.splits, size_t(params.matrices) * params.rows * params.outputs, params.has_bias != 0};
  for (uint i = thread_at.x; i < 8 * outputs; i += threads.x) {
    const uint m = i / outputs;
    const uint n = first_output + i % outputs;
    if (first_row + m < params.rows && n < params.outputs) {
      float sum = 0;
      for (uint s = 0; s < sharers; ++s) {
        sum += partials[s * (8 * outputs) + i];
      }
      store_split(y, (rows_before + first_row + m) * params.outputs + n, sum, bias, n, place);
    }
  }
}

instantiate_formats("quantized_matmul_qvm", "", qvm)
