// The softmax of the columns of matrices that come one after the other: a lane has the scores of two columns.
#pragma once

#include "mittens/softmax.h"
#include "mittens/tile.h"

namespace mittens {

// The first factor of a score: weights of half types are powers of two. In float32 the rounding of that product would
// show.
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

template <typename T>
inline float2 softmax_weights(float2 differences) {
  return float2(softmax_weight<T>(differences.x), softmax_weight<T>(differences.y));
}

// The maximum of a row that sees keys, whose scores are all -inf.
constant constexpr float lowest_score = -3.402823466e38f;

// A row that sees no key is 0; one that sees keys without any weight is NaN.
inline float inverse_sum(float m, float l) {
  return l == 0.0f && m == -INFINITY ? 0.0f : 1.0f / l;
}

// The natural logarithm of a row's sum of e^score.
template <typename T>
inline float logsumexp_of(float m, float l) {
  return is_same_v<T, float> ? m + precise::log(l) : (m + precise::log2(l)) * M_LN2_F;
}

// The maximum m that weights are relative to, and their sum l, over all scores so far. Lanes of a column have the same
// m, and each the l of its own rows.
template <typename T>
struct OnlineSoftmax {
  float2 m;
  float2 l;

  // Scores become weights; sums over the weights so far are scaled to a maximum that grows. It need not be the largest
  // score: m is raised only where one exceeds it by more than a factor that float16 has room for. Most tiles then need
  // no exchange over the lanes. Each column by itself, so that it does not matter which ones share a matrix.
  template <int C, int N>
  void update(thread Tile<float, C, 1>& scores, thread Tile<float, N, 1>& sums) {
    constexpr float headroom = 8;
    float2 largest = scores.at[0][0];
#pragma unroll
    for (int c = 1; c < C; ++c) {
      largest = max(largest, scores.at[c][0]);
    }
    if (simd_any(largest.x > m.x + headroom || largest.y > m.y + headroom)) {
      largest = lanes_of_column_max(largest);
      const float2 raised =
          float2(largest.x > m.x + headroom ? largest.x : m.x, largest.y > m.y + headroom ? largest.y : m.y);
      const float2 decay = softmax_weights<T>(m - finite_maximum(raised));
      l *= decay;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        sums.at[n][0] *= decay;
      }
      m = raised;
    }
    const float2 base = finite_maximum(m);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      scores.at[c][0] = softmax_weights<T>(scores.at[c][0] - base);
      l += scores.at[c][0];
    }
  }
};

}  // namespace mittens
