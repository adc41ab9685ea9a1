// Products of one row of x with several matrices of quantized weights, in one launch:
//
//   y[n] = sum_k x[k] * w_i[n, k] + b_i[n]
//
// for the matrices i one behind another in y, as matmul/qmv.metal has each. A block of outputs is of one matrix. Of
// normed_matmuls x is a norm (matmul/normed_row.h).
#include <metal_stdlib>

#include "matmul/normed_row.h"
#include "matmul/quantized_rows.h"
#include "matmul/row_products.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

// The one of four that belongs to matrix i.
#define of_matrix(i, w, end) ((i) == 0 ? w##0##end : (i) == 1 ? w##1##end : (i) == 2 ? w##2##end : w##3##end)

// Parameters of four matrices [outputs of each, columns], and of a bias [outputs of each] for each of them.
#define several_matrices(...)                                                                       \
  quantized_matrix(w0, 1, 2, 3, __VA_ARGS__), quantized_matrix(w1, 4, 5, 6, __VA_ARGS__),           \
      quantized_matrix(w2, 7, 8, 9, __VA_ARGS__), quantized_matrix(w3, 10, 11, 12, __VA_ARGS__)
#define several_biases(...)                                                                         \
  const device __VA_ARGS__ *bias0 [[buffer(13)]], const device __VA_ARGS__ *bias1 [[buffer(14)]],   \
      const device __VA_ARGS__ *bias2 [[buffer(15)]], const device __VA_ARGS__ *bias3 [[buffer(16)]]

// The matrix that a block of outputs is of.
inline uint matrix_of(uint block, constant QuantizedMatmulsParams& params) {
  uint i = 0;
  for (uint j = 1; j < params.count; ++j) {
    i = block >= params.first_block[j] ? j : i;
  }
  return i;
}

// Writes the sum of an output of matrix i that a lane holds.
template <typename T>
inline void write_output(
    float sum, const device T* bias, device T* y, uint i, Sharing at, OwnOutputs outputs,
    constant QuantizedMatmulsParams& params) {
  constexpr int R = kRowOutputs;
  const uint output = outputs.first + at.lane / (32 / R);
  if (writes<R>(at, outputs, output) && output < params.outputs[i]) {
    sum += params.weights.has_bias ? float(bias[output]) : 0.0f;
    y[params.first_output[i] + output] = T(sum);
  }
}

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void quantized_matmuls(
    const device T* x [[buffer(0)]],  // [columns]
    several_matrices(ScaleOf<T, F>), several_biases(T),
    device T* y [[buffer(17)]],  // [all outputs]
    constant QuantizedMatmulsParams& params [[buffer(18)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, kRunColumns>;
  constexpr int R = kRowOutputs;
  threadgroup float partials[kProductSimdgroups * R];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const uint block = group.x * threads.y + thread_at.y;
  const uint i = matrix_of(block, params);
  const OwnOutputs outputs = outputs_of<R>(params.outputs[i], block - params.first_block[i]);
  const RowsOfX<T> rows = {x, params.weights.columns, 1};
  const typename Rows::Source matrix[1] = {
      Rows::of(of_matrix(i, w, ), of_matrix(i, w, _scales), of_matrix(i, w, _biases), params.weights, 0)
          .at(outputs.first, outputs.alone)};
  float totals[R];
  dot_rows<1, R, 1>(rows, matrix, at, totals);
  const float sum = sum_of_sharers(totals, at, partials);
  write_output(sum, of_matrix(i, bias, ), y, i, at, outputs, params);
}

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void normed_matmuls(
    const device float* x [[buffer(0)]],  // [columns]
    several_matrices(ScaleOf<T, F>), several_biases(T),
    const device float* squares [[buffer(17)]],  // [blocks]
    device T* y [[buffer(18)]],                  // [all outputs]
    constant QuantizedMatmulsParams& params [[buffer(19)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, kRunColumns>;
  constexpr int R = kRowOutputs;
  threadgroup float partials[kProductSimdgroups * R];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const uint block = group.x * threads.y + thread_at.y;
  const uint i = matrix_of(block, params);
  const OwnOutputs outputs = outputs_of<R>(params.outputs[i], block - params.first_block[i]);
  const NormedRow<T> row = {x, params.weights.columns};
  const typename Rows::Source matrix[1] = {
      Rows::of(of_matrix(i, w, ), of_matrix(i, w, _scales), of_matrix(i, w, _biases), params.weights, 0)
          .at(outputs.first, outputs.alone)};
  float totals[R];
  dot_rows<1, R, 1>(row, matrix, at, totals);
  const float sum = sum_of_sharers(totals, at, partials);
  const float n = norm_of_row(squares, params.weights.columns, params.norm, lane);
  write_output(normed_sum(sum, n, row, lane), of_matrix(i, bias, ), y, i, at, outputs, params);
}

instantiate_common("quantized_matmuls", quantized_matmuls)
instantiate_common("quantized_matmuls_normed", normed_matmuls)
