// A mixture of experts beside a shared expert, in two launches:
//
//   hidden[t, i, n] = act(sum_k x[t, k] * gate[e_i, n, k]) * (sum_k x[t, k] * up[e_i, n, k])
//   y[t, n] = sum_i weights[t, i] * (sum_k hidden[t, i, k] * down[e_i, n, k])
//
// over the chosen experts e_i of token t, and the shared expert behind them, whose matrices are its own and whose
// weight is the sigmoid of shared_logits[t]. NaN where an index is out of range.
//
// As moe/gather_swiglu.metal and moe/gather_qmm.metal: the first launch has a threadgroup for each token, expert and
// block of outputs; in the second a simdgroup has each expert.
#include <metal_stdlib>

#include "matmul/quantized_rows.h"
#include "matmul/rows.h"
#include "mittens/instantiate.h"
#include "moe/shared_pairs.h"

using namespace metal;
using namespace mittens;

// A matrix of a token: of one of the chosen experts, or the shared one, which is last.
struct ChosenExpert {
  uint token;
  uint expert;
  bool is_shared;
  bool is_valid;
};

inline ChosenExpert chosen_expert(const device uint* indices, constant GatherQmmParams& params, uint token, uint i) {
  const uint count = params.pairs_per_sum - 1;
  ChosenExpert chosen;
  chosen.token = token;
  chosen.is_shared = i == count;
  chosen.expert = chosen.is_shared ? 0 : indices[token * count + i];
  chosen.is_valid = chosen.is_shared || chosen.expert < params.pairs.matrices;
  return chosen;
}

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void mixture_swiglu(
    const device T* x [[buffer(0)]],  // [tokens, columns]
    quantized_matrix(gate, 1, 2, 3, ScaleOf<T, F>),  // [matrices, outputs, columns]
    quantized_matrix(up, 4, 5, 6, ScaleOf<T, F>),  // as gate
    quantized_matrix(shared_gate, 7, 8, 9, ScaleOf<T, F>),  // [outputs, columns]
    quantized_matrix(shared_up, 10, 11, 12, ScaleOf<T, F>),
    const device uint* indices [[buffer(13)]],  // [tokens, chosen]
    device T* y [[buffer(14)]],  // [tokens, chosen + 1, outputs]
    constant GatherQmmParams& params [[buffer(15)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, 8>;
  constexpr int R = kRowOutputs / 2;
  constexpr int C = 2 * R;
  threadgroup float partials[kProductSimdgroups * C];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const OwnOutputs outputs = outputs_of<R>(params.weights.outputs, group.x * threads.y + thread_at.y);
  const ChosenExpert chosen =
      chosen_expert(indices, params, group.z / params.pairs_per_sum, group.z % params.pairs_per_sum);
  float gated = not_a_number();
  if (chosen.is_valid) {
    const RowsOfX<T> rows = {x + size_t(chosen.token) * params.weights.columns, params.weights.columns, 1};
    const bool own = chosen.is_shared;
    const typename Rows::Source both[2] = {
        Rows::of(own ? shared_gate : gate, own ? shared_gate_scales : gate_scales,
                 own ? shared_gate_biases : gate_biases, params.weights, chosen.expert)
            .at(outputs.first, outputs.alone),
        Rows::of(own ? shared_up : up, own ? shared_up_scales : up_scales, own ? shared_up_biases : up_biases,
                 params.weights, chosen.expert)
            .at(outputs.first, outputs.alone)};
    float totals[C];
    multiply_rows<2, R, 1>(rows, both, at, totals);
    // The upper half of the lanes has the sums of up.
    gated = gated_product(sum_of_sharers(totals, at, partials), lane, params);
  }
  const uint output = outputs.first + lane / (16 / R);
  if (writes<C>(at, outputs, output) && lane < 16) {
    y[size_t(group.z) * params.weights.outputs + output] = T(gated);
  }
}

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(32 * kMostSummed)]] void mixture_sum(
    const device T* x [[buffer(0)]],  // [tokens, chosen + 1, columns]
    quantized_matrix(w, 1, 2, 3, ScaleOf<T, F>),  // [matrices, outputs, columns]
    quantized_matrix(shared_w, 4, 5, 6, ScaleOf<T, F>),  // [outputs, columns]
    const device uint* indices [[buffer(7)]],  // [tokens, chosen]
    const device T* weights [[buffer(8)]],  // [tokens, chosen]
    const device T* shared_logits [[buffer(9)]],  // [tokens]
    device T* y [[buffer(10)]],  // [tokens, outputs]
    constant GatherQmmParams& params [[buffer(11)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, F == affine_8 ? 8 : 16>;  // fewer columns take fewer registers
  constexpr int R = kRowOutputs;
  threadgroup float partials[kMostSummed * R];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const OwnOutputs outputs = outputs_of<R>(params.weights.outputs, group.x * threads.y + thread_at.y);
  const uint token = group.z;
  const ChosenExpert each = chosen_expert(indices, params, token, min(lane, params.pairs_per_sum - 1));
  float sum = not_a_number();
  if (simd_min(uint(each.is_valid)) != 0) {
    const uint i = at.position / 32;
    const ChosenExpert chosen = chosen_expert(indices, params, token, i);
    const size_t row = size_t(token) * params.pairs_per_sum + i;
    const RowsOfX<T> rows = {x + row * params.weights.columns, params.weights.columns, 1};
    const bool own = chosen.is_shared;
    const typename Rows::Source matrix[1] = {Rows::of(own ? shared_w : w, own ? shared_w_scales : w_scales,
                                                      own ? shared_w_biases : w_biases, params.weights, chosen.expert)
                                                 .at(outputs.first, outputs.alone)};
    float totals[R];
    multiply_rows<1, R, 1>(rows, matrix, Sharing{lane, 1, at.block, lane}, totals);
    const float weight = own ? 1.0f / (1.0f + precise::exp(-float(shared_logits[token]))) : float(weights[row - token]);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      totals[r] *= weight;
    }
    sum = sum_of_sharers(totals, at, partials);
  }
  // Computed again, as in moe/gather_qmm.metal.
  const OwnOutputs written = outputs_of<R>(params.weights.outputs, group.x * threads.y + thread_at.y);
  const uint output = written.first + lane / (32 / R);
  if (writes<R>(at, written, output)) {
    y[size_t(token) * params.weights.outputs + output] = T(sum);
  }
}

instantiate_types("mixture_swiglu_4bit", mixture_swiglu, affine_4)
    instantiate_types("mixture_swiglu_8bit", mixture_swiglu, affine_8)
        instantiate_types("mixture_swiglu_mxfp4", mixture_swiglu, mxfp4)
            instantiate_types("mixture_sum_4bit", mixture_sum, affine_4)
                instantiate_types("mixture_sum_8bit", mixture_sum, affine_8)
                    instantiate_types("mixture_sum_mxfp4", mixture_sum, mxfp4)
