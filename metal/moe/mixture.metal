// A mixture of experts from its router's logits on, in two launches:
//
//   e_i, weights[t, i] = the experts that moe/route.h chooses by logits[t], and their weights
//   hidden[t, i, n] = act(sum_k x[t, k] * gate[e_i, n, k] + gate_bias[e_i, n]) * (the same of up)
//   y[t, n] = sum_i weights[t, i] * (sum_k hidden[t, i, k] * down[e_i, n, k] + down_bias[e_i, n])
//
// over the chosen experts of token t and, where there is one, a shared expert behind them, whose matrices are its own
// and whose weight is the sigmoid of shared_logits[t].
//
// As moe/gather_swiglu.metal and moe/gather_qmm.metal: the first launch has a threadgroup for each token, expert and
// block of outputs; in the second a simdgroup has each expert. In the first a threadgroup finds its expert by itself,
// so that no launch comes before for the choice alone; one threadgroup of a token writes it for the second. Of
// mixture_normed_sum y is added to a residual, for a norm of the sum (matmul/normed_row.h).
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
[[kernel, max_total_threads_per_threadgroup(256)]] void mixture_swiglu(
    const device T* x [[buffer(0)]],                        // [tokens, columns]
    quantized_matrix(gate, 1, 2, 3, ScaleOf<T, F>),         // [matrices, outputs, columns]
    quantized_matrix(up, 4, 5, 6, ScaleOf<T, F>),           // as gate
    quantized_matrix(shared_gate, 7, 8, 9, ScaleOf<T, F>),  // [outputs, columns]
    quantized_matrix(shared_up, 10, 11, 12, ScaleOf<T, F>),
    const device T* gate_bias [[buffer(13)]],        // [matrices, outputs]
    const device T* up_bias [[buffer(14)]],          // [matrices, outputs]
    const device T* logits [[buffer(15)]],           // [tokens, matrices]
    const device float* router_bias [[buffer(16)]],  // [matrices]
    device T* y [[buffer(17)]],                      // [tokens, places, outputs]
    device uint* indices [[buffer(18)]],             // [tokens, chosen]
    device T* weights [[buffer(19)]],                // [tokens, chosen]
    constant MixtureParams& params [[buffer(20)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, 8>;
  constexpr int R = kRowOutputs / 2;
  constexpr int C = 2 * R;
  threadgroup float partials[kProductSimdgroups * C];
  threadgroup float scores[kMostExperts];
  threadgroup uint keys[kMostExperts];
  threadgroup uint found[1];
  const uint token = group.z / params.experts.pairs_per_sum;
  const uint i = group.z % params.experts.pairs_per_sum;
  const bool own = i == params.route.k;  // the shared expert's
  if (!own) {
    if (thread_at.y == 0 && thread_at.x < 32) {
      find_expert(logits, router_bias, indices, weights, token, i, group.x, params.route, lane, scores, keys, found);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  const uint expert = own ? 0 : found[0];
  constant QuantizedParams& shape = params.experts.weights;
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const OwnOutputs outputs = outputs_of<R>(shape.outputs, group.x * threads.y + thread_at.y);
  const RowsOfX<T> rows = {x + size_t(token) * shape.columns, shape.columns, 1};
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
  dot_rows<2, R, 1>(rows, both, at, totals);
#pragma unroll
  for (int c = 0; c < C; ++c) {
    totals[c] += int(at.position) == c ? addend : 0.0f;
  }
  // The upper half of the lanes has the sums of up.
  const float gated = gated_product(sum_of_sharers(totals, at, partials), lane, params.experts);
  const uint output = outputs.first + lane / (16 / R);
  if (writes<C>(at, outputs, output) && lane < 16) {
    y[size_t(group.z) * shape.outputs + output] = T(gated);
  }
}

// The weighted sums of a block of outputs of a token, for the lanes that sum_of_sharers gives them to.
template <typename T, QuantizedFormat F>
inline float sum_of_experts(
    const device T* x, const device uint* w, const device ScaleOf<T, F>* w_scales, const device ScaleOf<T, F>* w_biases,
    const device uint* shared_w, const device ScaleOf<T, F>* shared_w_scales,
    const device ScaleOf<T, F>* shared_w_biases, const device T* bias, const device uint* indices,
    const device T* weights, const device T* shared_logits, constant MixtureParams& params, Sharing at, uint token,
    uint block, threadgroup float* partials) {
  using Rows = QuantizedRows<T, F, F == affine_8 ? 8 : 16>;  // fewer columns take fewer registers
  constexpr int R = kRowOutputs;
  constant QuantizedParams& shape = params.experts.weights;
  const OwnOutputs outputs = outputs_of<R>(shape.outputs, block);
  const uint i = at.position / 32;
  const bool own = i == params.route.k;  // the shared expert's
  const uint place = token * params.route.k + (own ? 0 : i);
  const uint expert = own ? 0 : indices[place];
  const RowsOfX<T> rows = {x + (size_t(token) * params.experts.pairs_per_sum + i) * shape.columns, shape.columns, 1};
  const typename Rows::Source matrix[1] = {
      Rows::of(own ? shared_w : w, own ? shared_w_scales : w_scales, own ? shared_w_biases : w_biases, shape, expert)
          .at(outputs.first, outputs.alone)};
  float addend = 0;
  if (shape.has_bias && !own && at.lane < R) {
    addend = float(bias[size_t(expert) * shape.outputs + outputs.first + (outputs.alone ? 0 : at.lane)]);
  }
  float totals[R];
  dot_rows<1, R, 1>(rows, matrix, Sharing{at.lane, 1, at.block, at.lane}, totals);
  const float weight = own ? 1.0f / (1.0f + precise::exp(-float(shared_logits[token]))) : float(weights[place]);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    totals[r] = (totals[r] + (int(at.lane) == r ? addend : 0.0f)) * weight;
  }
  return sum_of_sharers(totals, at, partials);
}

// Parameters of the two kernels below.
#define mixture_sum_inputs(T, ...)                                                                         \
  const device T *x [[buffer(0)]], quantized_matrix(w, 1, 2, 3, __VA_ARGS__),                              \
      quantized_matrix(shared_w, 4, 5, 6, __VA_ARGS__), const device T *bias [[buffer(7)]],                \
      const device uint *indices [[buffer(8)]], const device T *weights [[buffer(9)]],                     \
      const device T *shared_logits [[buffer(10)]]

// x [tokens, places, columns], w and bias of all matrices and of the shared expert's, indices and weights [tokens,
// chosen], shared_logits [tokens].
template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(32 * kMostSummed)]] void mixture_sum(
    mixture_sum_inputs(T, ScaleOf<T, F>),
    device T* y [[buffer(11)]],  // [tokens, outputs]
    constant MixtureParams& params [[buffer(12)]], thread_of_plane) {
  constexpr int R = kRowOutputs;
  threadgroup float partials[kMostSummed * R];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const uint block = group.x * threads.y + thread_at.y;
  const float sum = sum_of_experts<T, F>(
      x, w, w_scales, w_biases, shared_w, shared_w_scales, shared_w_biases, bias, indices, weights, shared_logits,
      params, at, group.z, block, partials);
  // Computed again, as in moe/gather_qmm.metal.
  const uint all = params.experts.weights.outputs;
  const OwnOutputs written = outputs_of<R>(all, block);
  const uint output = written.first + lane / (32 / R);
  if (writes<R>(at, written, output)) {
    y[size_t(group.z) * all + output] = T(sum);
  }
}

// Of one token.
template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(32 * kMostSummed)]] void mixture_normed_sum(
    mixture_sum_inputs(T, ScaleOf<T, F>),
    const device T* residual [[buffer(11)]],     // [outputs]
    const device T* norm_weight [[buffer(12)]],  // [outputs]
    device T* y [[buffer(13)]],                  // [outputs]
    device float* scaled [[buffer(14)]],         // [outputs], y * norm_weight
    device float* squares [[buffer(15)]],        // [blocks], of y
    constant MixtureParams& params [[buffer(16)]], thread_of_plane) {
  constexpr int R = kRowOutputs;
  threadgroup float partials[kMostSummed * R];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const uint block = group.x * threads.y + thread_at.y;
  const float sum = sum_of_experts<T, F>(
      x, w, w_scales, w_biases, shared_w, shared_w_scales, shared_w_biases, bias, indices, weights, shared_logits,
      params, at, 0, block, partials);
  const uint all = params.experts.weights.outputs;
  const SummedRow<T> row = {residual, norm_weight, y, scaled, squares};
  write_sums<R>(row, T(sum), at, outputs_of<R>(all, block), block, all);
}

instantiate_common("mixture_swiglu", mixture_swiglu)
instantiate_common("mixture_sum", mixture_sum)
instantiate_common("mixture_normed_sum", mixture_normed_sum)
