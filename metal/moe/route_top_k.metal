// A router's choice: the k experts of the largest scores, and their weights (moe/route.h).
//
// Weights are the scores of the chosen, divided by their sum where they are renormalized, or the softmax of the chosen
// logits; times a scale. One simdgroup has a token.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "moe/route.h"

using namespace metal;
using namespace mittens;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32)]] void route_top_k(
    const device T* logits [[buffer(0)]],    // [rows, experts]
    const device float* bias [[buffer(1)]],  // [experts]
    device uint* indices [[buffer(2)]],      // [rows, k]
    device T* weights [[buffer(3)]],         // [rows, k]
    constant RouteParams& params [[buffer(4)]], uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float scores[kMostExperts];
  threadgroup uint keys[kMostExperts];
  score_experts(logits + size_t(row) * params.experts, bias, params, lane, scores, keys);
  uint chosen = 0;  // by this lane's place
  for (uint n = 0; n < params.k; ++n) {
    const uint index = take_expert(keys, params, lane);
    chosen = lane == place_of_round(n, params) ? index : chosen;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);  // scores are other lanes'
  const float weight = weight_of_chosen(scores, chosen, params, lane);
  if (lane < params.k) {
    indices[row * params.k + lane] = chosen;
    weights[row * params.k + lane] = T(weight);
  }
}

instantiate_types("route_top_k", route_top_k)
