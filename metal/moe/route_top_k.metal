// A router's choice: the k experts of the largest scores, and their weights.
//
//   scores[e] = softmax(logits)[e], sigmoid(logits[e]) or logits[e];   key[e] = T(scores[e]) + bias[e]
//
// Weights are the scores of the chosen, divided by their sum where they are renormalized, or the softmax of the chosen
// logits; times a scale. One simdgroup has a token: its lanes share out the experts, and find the next of the chosen k
// times. Keys are compared as unsigned integers that are in the same order; 0 is one that is taken.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "params/moe.h"

using namespace metal;
using namespace mittens;

// Integers from 1 on in the order of the keys. NaN is the least where the largest comes first, else the largest.
inline uint ordered(float key, bool descending) {
  const uint bits = as_type<uint>(key);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return descending ? 1 : 0xffffffffu;
  }
  if ((bits & 0x7fffffffu) == 0) {
    return 0x80000000u;  // zeros of both signs are equal
  }
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32)]] void route_top_k(
    const device T* logits [[buffer(0)]],    // [rows, experts]
    const device float* bias [[buffer(1)]],  // [experts]
    device uint* indices [[buffer(2)]],      // [rows, k]
    device T* weights [[buffer(3)]],         // [rows, k]
    constant RouteParams& params [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float scores[kMostExperts];
  threadgroup uint keys[kMostExperts];
  logits += size_t(row) * params.experts;
  const bool descending = params.descending;

  float most = -INFINITY;
  for (uint i = lane; i < params.experts; i += 32) {
    scores[i] = float(logits[i]);
    most = max(most, scores[i]);
  }
  if (params.scores == kScoresSoftmax) {
    most = simd_max(most);
    float sum = 0;
    for (uint i = lane; i < params.experts; i += 32) {
      scores[i] = precise::exp(scores[i] - most);
      sum += scores[i];
    }
    sum = simd_sum(sum);
    for (uint i = lane; i < params.experts; i += 32) {
      scores[i] /= sum;
    }
  } else if (params.scores == kScoresSigmoid) {
    for (uint i = lane; i < params.experts; i += 32) {
      scores[i] = 1.0f / (1.0f + precise::exp(-scores[i]));
    }
  }
  for (uint i = lane; i < params.experts; i += 32) {
    const float rounded = float(T(scores[i]));
    keys[i] = ordered(params.has_bias ? rounded + bias[i] : rounded, descending);
  }

  uint chosen = 0;  // by this lane's place
  for (uint n = 0; n < params.k; ++n) {
    uint best = 0;
    uint at = 0;
    for (uint i = lane; i < params.experts; i += 32) {
      const bool is_better = descending ? keys[i] > best : keys[i] != 0 && keys[i] >= best;
      best = is_better ? keys[i] : best;
      at = is_better ? i : at;
    }
    const uint largest = simd_max(best);
    const bool is_largest = best == largest && largest != 0;
    const uint index = descending ? simd_min(is_largest ? at : 0xffffffffu) : simd_max(is_largest ? at : 0);
    if (index % 32 == lane) {
      keys[index] = 0;
    }
    chosen = lane == (descending ? n : params.k - 1 - n) ? index : chosen;
  }

  simdgroup_barrier(mem_flags::mem_threadgroup);  // scores are other lanes'
  const bool has_one = lane < params.k;
  const float score = has_one ? scores[chosen] : 0.0f;
  float weight = score;
  if (params.scores == kScoresChosen) {
    const float largest = simd_max(has_one ? score : -INFINITY);
    const float exponential = has_one ? precise::exp(score - largest) : 0.0f;
    weight = exponential / simd_sum(exponential);
  } else if (params.renormalize) {
    weight = score / (simd_sum(score) + 1e-20f);
  }
  if (has_one) {
    indices[row * params.k + lane] = chosen;
    weights[row * params.k + lane] = T(weight * params.scale);
  }
}

instantiate_types("route_top_k", route_top_k)
