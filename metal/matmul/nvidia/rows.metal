// Products of a few rows of x with affine quantized weights, on NVIDIA GPUs:
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n],   w[n, k] = scales[n, k / group] * q[n, k] + biases[n, k / group]
//
// A threadgroup computes outputs_per_group outputs for M rows of x. Its simdgroups share out the columns, P words of
// weights a lane at a time (matmul/nvidia/rows.h), and add up their sums at the end: one barrier.
#include <metal_stdlib>

#include "matmul/nvidia/rows.h"
#include "mittens/instantiate.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

template <typename T, int bits, int P, int M, int B>
[[ kernel, threads_at_most(256, M > 2 ? 256 : 512) ]] void quantized_matmul_rows(
    const device T* x [[buffer(0)]],     // [batch, rows, columns]
    quantized_matrix(w, 1, 2, 3, T),     // [batch, outputs, columns]
    const device T* bias [[buffer(4)]],  // [outputs]
    device T* y [[buffer(5)]],           // [batch, rows, outputs]
    constant QuantizedParams& params [[buffer(6)]], thread_of_simdgroups) {
  constexpr int V = P * 32 / bits;
  constexpr bool exact = is_same_v<T, float>;
  threadgroup float partials[kProductPartials];
  threadgroup uint4 exchanges[kProductSimdgroups * exchange_size];

  const uint first_output = group.x * params.outputs_per_group;
  const uint outputs = min(params.outputs - first_output, params.outputs_per_group);
  const uint first_row = group.y * M;
  const uint products = params.outputs_per_group * M;  // of a simdgroup
  x += (size_t(group.z) * params.rows + first_row) * params.columns;
  const AffineMatrix<T> matrix = matrix_of(w, w_scales, w_biases, params, group.z, first_output);

  PartialProducts to;
  to.partials = partials + simdgroup * products;
  to.lane = lane;
  for (uint begin = simdgroup * 32 * V; begin < params.columns; begin += simdgroups * 32 * V) {
    const uint column = begin + lane * V;
    const bool inside = column < params.columns;
    const AffineMatrix<T> weights = at_column<bits>(matrix, column, params.group_shift);
    ActivationPacks<T, V, M> packs;
    load_activations(x, params.rows - first_row, params.columns, begin, lane, packs);
    // The first weights are on their way while the activations are made ready.
    AffineBatch<T, P, B> batch;
    if (inside && outputs >= B) {
      load_batch<T, P, B>(weights, 0, batch);
    }
    Activations<V, M> a;
    take_activations<T, bits, exact>(packs, lane, exchanges + simdgroup * exchange_size, a);
    to.add = begin >= simdgroups * 32 * V;
    pass_all_rows<T, bits, exact, P, M, B>(a, inside, weights, batch, outputs, params.two23, to);
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = t; i < outputs * M; i += simdgroups * 32) {
    const uint row = first_row + i % M;
    const uint output = first_output + i / M;
    if (row < params.rows) {
      const float sum =
          sum_of_simdgroups(partials, i, products, simdgroups) + (params.has_bias ? float(bias[output]) : 0.0f);
      y[(size_t(group.z) * params.rows + row) * params.outputs + output] = T(sum);
    }
  }
}

#define instantiate_rows(type, dtype, bits, M, B)                                                                    \
  instantiate_kernel("quantized_matmul_rows_" #bits "bit_" #M "_" #dtype, quantized_matmul_rows, type, bits,         \
                     lane_words(bits, M), M, B)

// Several rows in half types are products of matrices.
#define instantiate_bits(bits)                  \
  instantiate_rows(float, float32, bits, 1, 4)  \
  instantiate_rows(half, float16, bits, 1, 4)   \
  instantiate_rows(bfloat, bfloat16, bits, 1, 4) \
  instantiate_rows(float, float32, bits, 2, 4)  \
  instantiate_rows(float, float32, bits, 4, 2)  \
  instantiate_rows(float, float32, bits, 8, 2)

instantiate_bits(4)
instantiate_bits(8)
