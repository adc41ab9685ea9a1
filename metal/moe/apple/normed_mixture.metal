// The first launch of moe/mixture.metal for one token that is a norm (matmul/normed_row.h), on Apple GPUs.
#include <metal_stdlib>

#include "matmul/normed_row.h"
#include "matmul/quantized_rows.h"
#include "matmul/row_products.h"
#include "mittens/instantiate.h"
#include "moe/route.h"
#include "moe/shared_pairs.h"

using namespace metal;
using namespace mittens;

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void mixture_normed_swiglu(
    const device float* x [[buffer(0)]],                    // [columns]
    quantized_matrix(gate, 1, 2, 3, ScaleOf<T, F>),         // [matrices, outputs, columns]
    quantized_matrix(up, 4, 5, 6, ScaleOf<T, F>),           // as gate
    quantized_matrix(shared_gate, 7, 8, 9, ScaleOf<T, F>),  // [outputs, columns]
    quantized_matrix(shared_up, 10, 11, 12, ScaleOf<T, F>),
    const device T* gate_bias [[buffer(13)]],        // [matrices, outputs]
    const device T* up_bias [[buffer(14)]],          // [matrices, outputs]
    const device T* logits [[buffer(15)]],           // [matrices]
    const device float* router_bias [[buffer(16)]],  // [matrices]
    device T* y [[buffer(17)]],                      // [places, outputs]
    device uint* indices [[buffer(18)]],             // [chosen]
    device T* weights [[buffer(19)]],                // [chosen]
    constant MixtureParams& params [[buffer(20)]],
    const device float* squares [[buffer(21)]],  // [blocks]
    constant NormParams& norm [[buffer(22)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, 8>;
  constexpr int R = kRowOutputs / 2;
  constexpr int C = 2 * R;
  threadgroup float partials[kProductSimdgroups * C];
  threadgroup float scores[kMostExperts];
  threadgroup uint keys[kMostExperts];
  threadgroup uint found[1];
  const uint i = group.z;
  const bool own = i == params.route.k;  // the shared expert's
  if (!own) {
    if (thread_at.y == 0 && thread_at.x < 32) {
      find_expert(logits, router_bias, indices, weights, 0, i, group.x, params.route, lane, scores, keys, found);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const uint expert = own ? 0 : found[0];
  constant QuantizedParams& shape = params.experts.weights;
  const NormedRow<T> row = {x, shape.columns};
  const float n = norm_of_row(squares, shape.columns, norm, lane);
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const OwnOutputs outputs = outputs_of<R>(shape.outputs, group.x * threads.y + thread_at.y);
  const typename Rows::Source both[2] = {
      Rows::of(
          own ? shared_gate : gate, own ? shared_gate_scales : gate_scales, own ? shared_gate_biases : gate_biases,
          shape, expert)
          .at(outputs.first, outputs.alone),
      Rows::of(
          own ? shared_up : up, own ? shared_up_scales : up_scales, own ? shared_up_biases : up_biases, shape, expert)
          .at(outputs.first, outputs.alone)};
  const float addend = gated_addend<R>(gate_bias, up_bias, expert, !own, shape, outputs, at.position);
  float totals[C];
  dot_rows<2, R, 1>(row, both, at, totals);
#pragma unroll
  for (int c = 0; c < C; ++c) {
    totals[c] = normed_sum(totals[c], n, row, lane) + (int(at.position) == c ? addend : 0.0f);
  }
  // The upper half of the lanes has the sums of up.
  const float gated = gated_product(sum_of_sharers(totals, at, partials), lane, params.experts);
  const uint output = outputs.first + lane / (16 / R);
  if (writes<C>(at, outputs, output) && lane < 16) {
    y[i * shape.outputs + output] = T(gated);
  }
}

instantiate_common("mixture_normed_swiglu", mixture_normed_swiglu)
