// As matmul/quantized_swiglu.metal, for rows of x one by one with 4-bit weights, in half types (matmul/nvidia/mma_row.h;
// row_by_matrices in csrc/ops/matmul/quantized_weights.cpp says where):
//
//   y[n] = activate(sum_k x[k] * gate[n, k]) * sum_k x[k] * up[n, k],   as matmul/activation.h
//
// A threadgroup computes 8 outputs; its simdgroups share out the columns.
#include <metal_stdlib>

#include "matmul/activation.h"
#include "matmul/nvidia/mma_row.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(512)]] void quantized_swiglu_row(
    const device T* x [[buffer(0)]],     // [rows, columns]
    quantized_matrix(gate, 1, 2, 3, T),  // [outputs, columns]
    quantized_matrix(up, 4, 5, 6, T),    // as gate
    device T* y [[buffer(7)]],           // [rows, outputs]
    constant QuantizedParams& params [[buffer(8)]], thread_of_simdgroups) {
  static_assert(row_blocks == 2, "a block of products of each matrix");
  constexpr uint group_outputs = 8;
  constexpr uint products = row_blocks * group_outputs;  // of a simdgroup
  threadgroup float partials[kRowSimdgroups * products];

  const uint first_output = group.x * group_outputs;
  const uint outputs = min(params.outputs - first_output, group_outputs);
  const uint own = min(tile_row(lane), outputs - 1);  // absent ones repeat the last
  AffineMatrix<T> matrices[row_blocks];
  matrices[0] = matrix_of(gate, gate_scales, gate_biases, params, 0, first_output).row(own);
  matrices[1] = matrix_of(up, up_scales, up_biases, params, 0, first_output).row(own);
  multiply_row(
      x + size_t(group.y) * params.columns, matrices, params, lane, simdgroup, simdgroups,
      partials + simdgroup * products);

  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < outputs) {
    const float gate_sum = sum_of_simdgroups(partials, t, products, simdgroups);
    const float linear = sum_of_simdgroups(partials, t + group_outputs, products, simdgroups);
    const float gate = activate(gate_sum, params.gate_alpha, params.gate_beta);
    y[size_t(group.y) * params.outputs + first_output + t] = T(gate * linear);
  }
}

instantiate_kernel("quantized_swiglu_row_4bit_float16", quantized_swiglu_row, half)
instantiate_kernel("quantized_swiglu_row_4bit_bfloat16", quantized_swiglu_row, bfloat)
