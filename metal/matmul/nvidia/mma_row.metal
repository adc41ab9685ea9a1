// One row of x with 4-bit weights, in half types (matmul/nvidia/mma_row.h; row_by_matrices in
// csrc/ops/matmul/quantized_weights.cpp says where):
//
//   y[n] = sum_k x[k] * w[n, k] + b[n],   w[n, k] = scales[n, k / group] * q[n, k] + biases[n, k / group]
//
// A threadgroup computes 16 outputs; its simdgroups share out the columns.
#include <metal_stdlib>

#include "matmul/nvidia/mma_row.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(512)]] void quantized_matmul_row(
    const device T* x [[buffer(0)]],     // [batch, columns]
    quantized_matrix(w, 1, 2, 3, T),     // [batch, outputs, columns]
    const device T* bias [[buffer(4)]],  // [outputs]
    device T* y [[buffer(5)]],           // [batch, outputs]
    constant QuantizedParams& params [[buffer(6)]], thread_of_simdgroups) {
  constexpr uint outputs_per_group = row_blocks * 8;
  threadgroup float partials[kRowSimdgroups * outputs_per_group];

  const uint first_output = group.x * outputs_per_group;
  const uint outputs = min(params.outputs - first_output, outputs_per_group);
  const AffineMatrix<T> matrix = matrix_of(w, w_scales, w_biases, params, group.z, first_output);
  AffineMatrix<T> blocks[row_blocks];
#pragma unroll
  for (int r = 0; r < row_blocks; ++r) {
    blocks[r] = matrix.row(min(r * 8 + tile_row(lane), outputs - 1));  // the last one for those not there
  }
  multiply_row(
      x + size_t(group.z) * params.columns, blocks, params, lane, simdgroup, simdgroups,
      partials + simdgroup * outputs_per_group);

  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < outputs) {
    const uint output = first_output + t;
    const float sum =
        sum_of_simdgroups(partials, t, outputs_per_group, simdgroups) + (params.has_bias ? float(bias[output]) : 0.0f);
    y[size_t(group.z) * params.outputs + output] = T(sum);
  }
}

instantiate_kernel("quantized_matmul_row_4bit_float16", quantized_matmul_row, half)
instantiate_kernel("quantized_matmul_row_4bit_bfloat16", quantized_matmul_row, bfloat)
