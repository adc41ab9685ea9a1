// What the attention kernels share. Scores are in units of log2(e) for half types, whose weights are then powers of
// two; in float32 they stay as they are, since the rounding of that product would show.
#pragma once

#include <metal_stdlib>

#include "mittens/softmax.h"
#include "params/attention.h"

using namespace metal;

namespace mittens {

constant constexpr float lowest_score = -3.402823466e38f;

// The score of a key that a row must not see. A row that sees none then has the mean of all values, as mx gives it; an
// additive mask hides by -inf, as mx's would have to, and such a row is NaN.
inline float hidden_score(constant AttentionParams& params) {
  return params.mask == additive_mask ? -INFINITY : lowest_score;
}

// By what a mask or a sink becomes a score.
template <typename T>
constexpr float score_unit() {
  return is_same_v<T, float> ? 1.0f : M_LOG2E_F;
}

// The weight of a score, less the maximum.
template <typename T>
inline float softmax_weight(float difference) {
  if constexpr (is_same_v<T, float>) {
    return exp_of<float>(difference);
  } else {
    return fast::exp2(difference);
  }
}

// Not by arithmetic, which a compiler may take to have neither NaN nor infinity.
inline bool is_finite(float v) {
  return (as_type<uint>(v) & 0x7f800000u) != 0x7f800000u;
}

inline bool is_nan(float v) {
  return (as_type<uint>(v) & 0x7fffffffu) > 0x7f800000u;
}

// Whether a row may not see some key.
inline bool may_hide(constant AttentionParams& params) {
  return params.causal || params.mask != no_mask;
}

}  // namespace mittens
