// Products of one row of x with several matrices of quantized weights, in one launch:
//
//   y[n] = sum_k x[k] * w_i[n, k] + b_i[n]
//
// for the matrices i one behind another in y, as matmul/qmv.metal has each. A block of outputs is of one matrix.
#include <metal_stdlib>

#include "matmul/quantized_rows.h"
#include "matmul/rows.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

// The one of four that belongs to matrix i.
#define of_matrix(i, w) ((i) == 0 ? w##0 : (i) == 1 ? w##1 : (i) == 2 ? w##2 : w##3)

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void quantized_matmuls(
    const device T* x [[buffer(0)]],  // [columns]
    quantized_matrix(w0, 1, 2, 3, ScaleOf<T, F>),  // [outputs of each, columns]
    quantized_matrix(w1, 4, 5, 6, ScaleOf<T, F>), quantized_matrix(w2, 7, 8, 9, ScaleOf<T, F>),
    quantized_matrix(w3, 10, 11, 12, ScaleOf<T, F>),
    const device T* bias0 [[buffer(13)]],  // [outputs of each]
    const device T* bias1 [[buffer(14)]], const device T* bias2 [[buffer(15)]], const device T* bias3 [[buffer(16)]],
    device T* y [[buffer(17)]],  // [all outputs]
    constant QuantizedMatmulsParams& params [[buffer(18)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, run_columns(1)>;
  constexpr int R = kRowOutputs;
  threadgroup float partials[kProductSimdgroups * R];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const uint block = group.x * threads.y + thread_at.y;
  uint i = 0;
  for (uint j = 1; j < params.count; ++j) {
    i = block >= params.first_block[j] ? j : i;
  }
  const OwnOutputs outputs = outputs_of<R>(params.outputs[i], block - params.first_block[i]);
  const RowsOfX<T> rows = {x, params.weights.columns, 1};
  const typename Rows::Source matrix[1] = {Rows::of(of_matrix(i, w),
                                                    i == 0   ? w0_scales
                                                    : i == 1 ? w1_scales
                                                    : i == 2 ? w2_scales
                                                             : w3_scales,
                                                    i == 0   ? w0_biases
                                                    : i == 1 ? w1_biases
                                                    : i == 2 ? w2_biases
                                                             : w3_biases,
                                                    params.weights, 0)
                                               .at(outputs.first, outputs.alone)};
  float totals[R];
  multiply_rows<1, R, 1>(rows, matrix, at, totals);
  float sum = sum_of_sharers(totals, at, partials);
  const uint output = outputs.first + lane / (32 / R);
  if (writes<R>(at, outputs, output) && output < params.outputs[i]) {
    sum += params.weights.has_bias ? float(of_matrix(i, bias)[output]) : 0.0f;
    y[params.first_output[i] + output] = T(sum);
  }
}

instantiate_types("quantized_matmuls_4bit", quantized_matmuls, affine_4)
    instantiate_types("quantized_matmuls_8bit", quantized_matmuls, affine_8)
        instantiate_types("quantized_matmuls_mxfp4", quantized_matmuls, mxfp4)
