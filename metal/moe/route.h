// A router's choice by one simdgroup: its lanes share out the experts of a token, and find the next of the chosen.
//
//   scores[e] = softmax(logits)[e], sigmoid(logits[e]), sqrt(log(1 + exp(logits[e]))) or logits[e];
//   key[e] = T(scores[e]) + bias[e], or without T
//
// Keys of groups that are dropped are another number. Keys are compared as unsigned integers that are in the same order;
// 0 is one that is taken.
#pragma once

#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "params/moe.h"

using namespace metal;

namespace mittens {

// NaN is the least where the largest comes first, else the largest.
inline uint order_of_nan(bool descending) {
  return descending ? 1 : 0xffffffffu;
}

// Integers from 1 on in the order of the keys.
inline uint ordered(float key, bool descending) {
  const uint bits = as_type<uint>(key);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return order_of_nan(descending);
  }
  if ((bits & 0x7fffffffu) == 0) {
    return 0x80000000u;  // zeros of both signs are equal
  }
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Gives the experts of groups another key: of all but the groups with the largest sums of two keys. A lane has a group.
inline void drop_groups(constant RouteParams& params, uint lane, threadgroup uint* keys) {
  const bool descending = params.descending;
  const uint size = params.experts / params.groups;
  const uint nan = order_of_nan(descending);
  simdgroup_barrier(mem_flags::mem_threadgroup);  // keys are other lanes'
  float first = -INFINITY;
  float second = -INFINITY;
  bool has_nan = false;
  for (uint i = 0; i < size && lane < params.groups; ++i) {
    const uint order = keys[lane * size + i];
    has_nan = has_nan || order == nan;
    const float key = as_type<float>(order & 0x80000000u ? order & 0x7fffffffu : ~order);
    second = max(second, min(first, key));
    first = max(first, key);
  }
  const uint sum = lane >= params.groups || has_nan ? 0xffffffffu : ordered(first + second, false);
  uint place = 0;
  for (uint g = 0; g < params.groups; ++g) {
    const uint other = simd_shuffle(sum, ushort(g));
    place += other < sum || (other == sum && g < lane) ? 1 : 0;
  }
  const bool is_dropped = lane < params.groups && place < params.groups - params.kept;
  simdgroup_barrier(mem_flags::mem_threadgroup);  // keys are read
  for (uint i = 0; i < size && is_dropped; ++i) {
    keys[lane * size + i] = ordered(params.dropped, descending);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Scores and keys of a token's logits, for kMostExperts at most. A lane writes its own experts', and one key at least.
template <typename T>
inline void score_experts(
    const device T* logits, const device float* bias, constant RouteParams& params, uint lane,
    threadgroup float* scores, threadgroup uint* keys) {
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
  } else if (!is_nvidia && params.scores == kScoresSqrtSoftplus) {
    for (uint i = lane; i < params.experts; i += 32) {
      const float x = scores[i];
      const float e = precise::exp(-fabs(x));
      // log(1 + e), whose sum loses digits of a small e.
      const float rest = e < 0.01f ? e * (1.0f - e * (0.5f - e * (1.0f / 3.0f - e * 0.25f))) : precise::log(1.0f + e);
      scores[i] = precise::sqrt((x < 0.0f ? 0.0f : x) + rest);
    }
  }
  keys[lane] = 0;
  for (uint i = lane; i < params.experts; i += 32) {
    const float key = !is_nvidia && params.precise ? scores[i] : float(T(scores[i]));
    keys[i] = ordered(params.has_bias ? key + bias[i] : key, params.descending);
  }
  if (!is_nvidia && params.kept < params.groups) {
    drop_groups(params, lane, keys);
  }
}

// The place of the n-th that is found among the chosen.
inline uint place_of_round(uint n, constant RouteParams& params) {
  return params.descending ? n : params.k - 1 - n;
}

// Finds the expert of the largest key that is left, and takes it.
inline uint take_expert(threadgroup uint* keys, constant RouteParams& params, uint lane) {
  const bool descending = params.descending;
  uint best = keys[lane];
  uint at = lane;
  for (uint i = lane + 32; i < params.experts; i += 32) {
    const uint key = keys[i];
    const bool is_better = descending ? key > best : key != 0 && key >= best;
    best = is_better ? key : best;
    at = is_better ? i : at;
  }
  const uint largest = simd_max(best);
  const bool is_largest = best == largest && largest != 0;
  const uint index = descending ? simd_min(is_largest ? at : 0xffffffffu) : simd_max(is_largest ? at : 0);
  if (index % 32 == lane) {
    keys[index] = 0;
  }
  return index;
}

// The weight of the expert that a lane has, one for each of the k places. All lanes take part, once all have scored.
inline float weight_of_chosen(threadgroup const float* scores, uint chosen, constant RouteParams& params, uint lane) {
  const bool has_one = lane < params.k;
  const float score = has_one ? scores[chosen] : 0.0f;
  float weight = score;
  if (params.scores == kScoresChosen) {
    const float largest = simd_max(has_one ? score : -INFINITY);
    const float exponential = has_one ? precise::exp(score - largest) : 0.0f;
    weight = exponential / simd_sum(exponential);
  } else if (params.renormalize) {
    weight = score / (simd_sum(score) + (is_nvidia ? least_sum() : params.eps));
  }
  return weight * params.scale;
}

// Finds the expert of place i of a token, by one simdgroup of each block of outputs. The simdgroup of the first block
// and place finds all experts, and writes them and their weights [tokens, chosen].
template <typename T>
inline void find_expert(
    const device T* logits, const device float* bias, device uint* indices, device T* weights, uint token, uint i,
    uint block, constant RouteParams& params, uint lane, threadgroup float* scores, threadgroup uint* keys,
    threadgroup uint* found) {
  score_experts(logits + size_t(token) * params.experts, bias, params, lane, scores, keys);
  const bool is_writer = block == 0 && i == 0;
  const uint rounds = is_writer ? params.k : place_of_round(i, params) + 1;
  uint chosen = 0;  // by this lane's place
  uint expert = 0;
  for (uint n = 0; n < rounds; ++n) {
    const uint index = take_expert(keys, params, lane);
    const uint place = place_of_round(n, params);
    chosen = lane == place ? index : chosen;
    expert = i == place ? index : expert;
  }
  if (lane == 0) {
    found[0] = expert;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);  // scores are other lanes'
  if (is_writer) {
    const float weight = weight_of_chosen(scores, chosen, params, lane);
    if (lane < params.k) {
      indices[token * params.k + lane] = chosen;
      weights[token * params.k + lane] = T(weight);
    }
  }
}

}  // namespace mittens
