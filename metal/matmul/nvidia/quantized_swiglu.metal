// The gated half of a feed-forward block, from affine quantized weights in one launch, on NVIDIA
// GPUs:
//
//   y[m, n] = activate(sum_k x[m, k] * gate[n, k]) * sum_k x[m, k] * up[n, k],   as matmul/activation.h
//
// Laid out as matmul/nvidia/rows.metal; the rows of both matrices pass by the same activations. Sums, activation and
// product are in float32, rounded once.
#include <metal_stdlib>

#include "matmul/activation.h"
#include "matmul/nvidia/rows.h"
#include "mittens/instantiate.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

template <typename T, int bits, int P, int M, int B>
[[ kernel, threads_at_most(256, M > 1 ? 384 : 512) ]] void quantized_swiglu(
    const device T* x [[buffer(0)]],     // [rows, columns]
    quantized_matrix(gate, 1, 2, 3, T),  // [outputs, columns]
    quantized_matrix(up, 4, 5, 6, T),    // as gate
    device T* y [[buffer(7)]],           // [rows, outputs]
    constant QuantizedParams& params [[buffer(8)]], thread_of_simdgroups) {
  constexpr int V = P * 32 / bits;
  constexpr bool exact = is_same_v<T, float>;
  threadgroup float partials[kProductPartials];
  threadgroup uint4 exchanges[kProductSimdgroups * exchange_size];

  const uint first_output = group.x * params.outputs_per_group;
  const uint outputs = min(params.outputs - first_output, params.outputs_per_group);
  const uint first_row = group.y * M;
  const uint products = params.outputs_per_group * M;  // of a simdgroup and one matrix
  x += size_t(first_row) * params.columns;
  const AffineMatrix<T> gate_matrix = matrix_of(gate, gate_scales, gate_biases, params, 0, first_output);
  const AffineMatrix<T> up_matrix = matrix_of(up, up_scales, up_biases, params, 0, first_output);

  PartialProducts to;
  to.lane = lane;
  for (uint begin = simdgroup * 32 * V; begin < params.columns; begin += simdgroups * 32 * V) {
    const uint column = begin + lane * V;
    const bool inside = column < params.columns;
    ActivationPacks<T, V, M> packs;
    load_activations(x, params.rows - first_row, params.columns, begin, lane, packs);
    Activations<V, M> a;
    take_activations<T, bits, exact>(packs, lane, exchanges + simdgroup * exchange_size, a);
    to.add = begin >= simdgroups * 32 * V;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const AffineMatrix<T> weights = at_column<bits>(i == 0 ? gate_matrix : up_matrix, column, params.group_shift);
      AffineBatch<T, P, B> batch;
      if (inside && outputs >= B) {
        load_batch<T, P, B>(weights, 0, batch);
      }
      to.partials = partials + (i * simdgroups + simdgroup) * products;
      pass_all_rows<T, bits, exact, P, M, B>(a, inside, weights, batch, outputs, params.two23, to);
    }
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = t; i < outputs * M; i += simdgroups * 32) {
    const uint row = first_row + i % M;
    if (row < params.rows) {
      const float gate_sum = sum_of_simdgroups(partials, i, products, simdgroups);
      const float linear = sum_of_simdgroups(partials + simdgroups * products, i, products, simdgroups);
      const float gate = activate(gate_sum, params.gate_alpha, params.gate_beta);
      y[size_t(row) * params.outputs + first_output + i / M] = T(gate * linear);
    }
  }
}

#define instantiate_swiglu(bits, M, B) \
  instantiate_types("quantized_swiglu_" #bits "bit_" #M, quantized_swiglu, bits, lane_words(bits, M), M, B)

instantiate_swiglu(4, 1, 4)
instantiate_swiglu(4, 2, 4)
instantiate_swiglu(4, 4, 2)
instantiate_swiglu(8, 1, 4)
instantiate_swiglu(8, 2, 4)
instantiate_swiglu(8, 4, 2)
