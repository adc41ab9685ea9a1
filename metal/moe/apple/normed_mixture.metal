// The first launch of moe/mixture.metal for one token that is a norm (matmul/normed_row.h), on Apple GPUs.
#include <metal_stdlib>

#include "matmul/normed_row.h"
#include "matmul/quantized_rows.h"
#include "matmul/rows.h"
#include "mittens/instantiate.h"
#include "moe/route.h"
#include "moe/shared_pairs.h"

using namespace metal;
using namespace mittens;

// The expert at place i of a token, for all threads of a threadgroup. One threadgroup of a token writes the choice.
template <typename T>
inline uint find_expert(
    const device T* logits, const device float* router_bias, device uint* indices, device T* weights, uint token,
    uint i, bool is_writer, constant RouteParams& route, uint3 thread_at, uint lane, threadgroup float* scores,
    threadgroup uint* keys, threadgroup uint* found) {
  if (thread_at.y == 0 && thread_at.x < 32) {
    score_experts(logits + size_t(token) * route.experts, router_bias, route, lane, scores, keys);
    const uint rounds = is_writer ? route.k : place_of(i, route) + 1;
    uint chosen = 0;  // by this lane's place
    uint expert = 0;
    for (uint n = 0; n < rounds; ++n) {
      const uint index = take_expert(keys, route, lane);
      const uint place = place_of(n, route);
      chosen = lane == place ? index : chosen;
      expert = i == place ? index : expert;
    }
    if (lane == 0) {
      found[0] = expert;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);  // scores are other lanes'
    if (is_writer) {
      const float weight = weight_of_chosen(scores, chosen, route, lane);
      if (lane < route.k) {
        indices[token * route.k + lane] = chosen;
        weights[token * route.k + lane] = T(weight);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return found[0];
}

// Parameters but for x. gate and up [matrices, outputs, columns], shared_gate and shared_up
// [outputs, columns], gate_bias and up_bias [matrices, outputs], logits [tokens, matrices], router_bias [matrices] ->
// y [tokens, places, outputs], indices and weights [tokens, chosen].
#define mixture_swiglu_arguments(T, ...)                                                                          \
  quantized_matrix(gate, 1, 2, 3, __VA_ARGS__), quantized_matrix(up, 4, 5, 6, __VA_ARGS__),                      \
      quantized_matrix(shared_gate, 7, 8, 9, __VA_ARGS__), quantized_matrix(shared_up, 10, 11, 12, __VA_ARGS__), \
      const device T *gate_bias [[buffer(13)]], const device T *up_bias [[buffer(14)]],                           \
      const device T *logits [[buffer(15)]], const device float *router_bias [[buffer(16)]],                      \
      device T *y [[buffer(17)]], device uint *indices [[buffer(18)]], device T *weights [[buffer(19)]],          \
      constant MixtureParams &params [[buffer(20)]]
#define mixture_swiglu_weights                                                                               \
  gate, gate_scales, gate_biases, up, up_scales, up_biases, shared_gate, shared_gate_scales, shared_gate_biases, \
      shared_up, shared_up_scales, shared_up_biases, gate_bias, up_bias

// Writes the gated products of a row of x with an expert, or with the shared one.
template <typename T, QuantizedFormat F>
inline void gate_and_up(
    NormedRow<T> x, float n, const device uint* gate, const device ScaleOf<T, F>* gate_scales,
    const device ScaleOf<T, F>* gate_biases, const device uint* up, const device ScaleOf<T, F>* up_scales,
    const device ScaleOf<T, F>* up_biases, const device uint* shared_gate,
    const device ScaleOf<T, F>* shared_gate_scales, const device ScaleOf<T, F>* shared_gate_biases,
    const device uint* shared_up, const device ScaleOf<T, F>* shared_up_scales,
    const device ScaleOf<T, F>* shared_up_biases, const device T* gate_bias, const device T* up_bias, device T* y,
    uint expert, bool own, uint block, Sharing at, constant MixtureParams& params, threadgroup float* partials) {
  using Rows = QuantizedRows<T, F, 8>;
  constexpr int R = kRowOutputs / 2;
  constexpr int C = 2 * R;
  const uint lane = at.lane;
  constant QuantizedParams& shape = params.experts.weights;
  const OwnOutputs outputs = outputs_of<R>(shape.outputs, block);
  const typename Rows::Source both[2] = {
      Rows::of(own ? shared_gate : gate, own ? shared_gate_scales : gate_scales,
               own ? shared_gate_biases : gate_biases, shape, expert)
          .at(outputs.first, outputs.alone),
      Rows::of(own ? shared_up : up, own ? shared_up_scales : up_scales, own ? shared_up_biases : up_biases, shape,
               expert)
          .at(outputs.first, outputs.alone)};
  float addend = 0;
  if (shape.has_bias && !own && at.position < C) {
    const uint output = outputs.first + (outputs.alone ? 0 : at.position % R);
    const device T* bias = at.position < R ? gate_bias : up_bias;
    addend = float(bias[size_t(expert) * shape.outputs + output]);
  }
  float totals[C];
  multiply_rows<2, R, 1>(x, both, at, totals);
#pragma unroll
  for (int c = 0; c < C; ++c) {
    totals[c] = normed_sum(totals[c], n, x, lane) + (int(at.position) == c ? addend : 0.0f);
  }
  // The upper half of the lanes has the sums of up.
  const float gated = gated_product(sum_of_sharers(totals, at, partials), lane, params.experts);
  const uint output = outputs.first + lane / (16 / R);
  if (writes<C>(at, outputs, output) && lane < 16) {
    y[output] = T(gated);
  }
}

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void mixture_normed_swiglu(
    const device float* x [[buffer(0)]],  // [columns]
    mixture_swiglu_arguments(T, ScaleOf<T, F>),
    const device float* squares [[buffer(21)]],  // [blocks]
    constant NormParams& norm [[buffer(22)]], thread_of_plane) {
  threadgroup float partials[kProductSimdgroups * kRowOutputs];
  threadgroup float scores[kMostExperts];
  threadgroup uint keys[kMostExperts];
  threadgroup uint found[1];
  const uint i = group.z;
  const bool own = i == params.route.k;  // the shared expert's
  uint expert = 0;
  if (!own) {
    expert = find_expert(
        logits, router_bias, indices, weights, 0, i, group.x == 0 && i == 0, params.route, thread_at, lane, scores,
        keys, found);
  }
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const uint columns = params.experts.weights.columns;
  const NormedRow<T> row = {x, columns};
  const float n = norm_of_row(squares, columns, norm, lane);
  gate_and_up<T, F>(
      row, n, mixture_swiglu_weights, y + i * params.experts.weights.outputs, expert, own,
      group.x * threads.y + thread_at.y, at, params, partials);
}

instantiate_common("mixture_normed_swiglu", mixture_normed_swiglu)
