// The gated half of a feed-forward block, from quantized weights in one launch, on Apple GPUs, and in rare formats on
// all:
//
//   y[m, n] = activate(sum_k x[m, k] * gate[n, k]) * sum_k x[m, k] * up[n, k],   as matmul/activation.h
//
// One row of x or two as matmul/qmv.metal, more as matmul/qmm.metal; a simdgroup has half as many outputs, of both
// matrices. Sums, activation and product are in float32, rounded once. Of normed_swiglu x is
// a norm (matmul/normed_row.h).
#include <metal_stdlib>

#include "matmul/matrices.h"
#include "matmul/normed_row.h"
#include "matmul/quantized_rows.h"
#include "matmul/row_products.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, QuantizedFormat F, int M>
[[kernel, max_total_threads_per_threadgroup(256)]] void swiglu_by_rows(
    const device T* x [[buffer(0)]],                 // [rows, columns]
    quantized_matrix(gate, 1, 2, 3, ScaleOf<T, F>),  // [outputs, columns]
    quantized_matrix(up, 4, 5, 6, ScaleOf<T, F>),    // as gate
    device T* y [[buffer(7)]],                       // [rows, outputs]
    constant QuantizedParams& params [[buffer(8)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, 16>;
  constexpr int R = row_outputs(M, sizeof(T)) / 2;
  threadgroup float partials[kProductSimdgroups * 2 * R * M];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const uint first_row = group.y * M;
  // Of one row there may be many threadgroups; of several the offset takes fewer registers than a pointer.
  const RowsOfX<T> rows = {
      M == 1 ? x + size_t(first_row) * params.columns : x, params.columns, params.rows - first_row,
      M == 1 ? 0 : first_row * params.columns};
  const typename Rows::Source matrices[2] = {
      Rows::of(gate, gate_scales, gate_biases, params, 0), Rows::of(up, up_scales, up_biases, params, 0)};
  const device T* no_bias = nullptr;
  multiply_by_rows<M, R>(
      rows, matrices, no_bias, y, first_row, group.x * threads.y + thread_at.y, params, at, partials);
}

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void normed_swiglu(
    const device float* x [[buffer(0)]],             // [columns]
    quantized_matrix(gate, 1, 2, 3, ScaleOf<T, F>),  // [outputs, columns]
    quantized_matrix(up, 4, 5, 6, ScaleOf<T, F>),    // as gate
    const device float* squares [[buffer(7)]],       // [blocks]
    device T* y [[buffer(8)]],                       // [outputs]
    constant NormedSwigluParams& params [[buffer(9)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, 16>;
  constexpr int R = kRowOutputs / 2;
  constexpr int C = 2 * R;
  threadgroup float partials[kProductSimdgroups * C];
  constant QuantizedParams& weights = params.weights;
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const uint block = group.x * threads.y + thread_at.y;
  const OwnOutputs outputs = outputs_of<R>(weights.outputs, block);
  const NormedRow<T> row = {x, weights.columns};
  const typename Rows::Source matrices[2] = {
      Rows::of(gate, gate_scales, gate_biases, weights, 0).at(outputs.first, outputs.alone),
      Rows::of(up, up_scales, up_biases, weights, 0).at(outputs.first, outputs.alone)};
  float totals[C];
  dot_rows<2, R, 1>(row, matrices, at, totals);
  const float sum = sum_of_sharers(totals, at, partials);
  float sums[2] = {normed_sum(sum, norm_of_row(squares, weights.columns, params.norm, lane), row, lane)};
  sums[1] = simd_shuffle_xor(sums[0], ushort(16));  // the upper half of the lanes has up's
  const uint output = outputs.first + lane / (16 / R);
  if (writes<C>(at, outputs, output) && lane < 16) {
    const device T* no_bias = nullptr;
    y[output] = epilogue(sums, no_bias, weights, output);
  }
}

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void swiglu_by_matrices(
    const device T* x [[buffer(0)]],                 // [rows, columns]
    quantized_matrix(gate, 1, 2, 3, ScaleOf<T, F>),  // [outputs, columns]
    quantized_matrix(up, 4, 5, 6, ScaleOf<T, F>),    // as gate
    device T* y [[buffer(7)]],                       // [rows, outputs]
    constant QuantizedParams& params [[buffer(8)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, 16>;
  threadgroup float partials[MatrixPartials::all];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const uint first_row = (group.y * threads.y + at.block) * kMatrixRows;
  const typename Rows::Source matrices[2] = {
      Rows::of(gate, gate_scales, gate_biases, params, 0), Rows::of(up, up_scales, up_biases, params, 0)};
  const device T* no_bias = nullptr;
  multiply_by_matrices(
      x, matrices, no_bias, y, 0, first_row, group.x * (kMatrixOutputs / 2), params, at, threads.x, partials);
}

instantiate_formats("quantized_swiglu_qmv", "_1", swiglu_by_rows, 1)
instantiate_formats("quantized_swiglu_qmm", "", swiglu_by_matrices)
instantiate_several("quantized_swiglu_qmv", swiglu_by_rows)
instantiate_common("quantized_swiglu_normed", normed_swiglu)
