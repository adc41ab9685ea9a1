// The mathematics of softmax.
#pragma once

#include "mittens/reduce.h"

using namespace metal;

namespace mittens {

// exp(v) of a difference v <= 0, good enough for results in T. For float the rounding of v * log2(e), which grows with
// |v|, is put right to first order.
template <typename T>
inline float exp_of(float v) {
  const float scaled = v * M_LOG2E_F;
  const float power = fast::exp2(scaled);
  if constexpr (is_same_v<T, float>) {
    constexpr float log2e_rest = 1.92596303e-8f;  // log2(e) - M_LOG2E_F
    const float lost = scaled > -200.0f ? fma(v, M_LOG2E_F, -scaled) + v * log2e_rest : 0.0f;
    return fma(power, lost * M_LN2_F, power);
  }
  return power;
}

// The online softmax of the elements so far of a row, or of several rows: the maximum m, and l, the sum of exp(x - m).
// It begins as {-inf, 0}.
template <typename V>
struct SoftmaxState {
  V m;
  V l;
};

// The number to subtract before exp: not a maximum of -inf, since -inf - -inf would be NaN.
inline float finite_maximum(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

inline float2 finite_maximum(float2 maximum) {
  return float2(finite_maximum(maximum.x), finite_maximum(maximum.y));
}

template <typename T>
inline SoftmaxState<float> merge(SoftmaxState<float> a, SoftmaxState<float> b) {
  const float maximum = max(a.m, b.m);
  const float base = finite_maximum(maximum);
  return SoftmaxState<float>{maximum, a.l * exp_of<T>(a.m - base) + b.l * exp_of<T>(b.m - base)};
}

// Of the L lanes that share a row.
template <typename T, int L>
inline SoftmaxState<float> across(SoftmaxState<float> own, uint, float) {
  const float m = lanes_max<L>(own.m);
  return SoftmaxState<float>{m, lanes_sum<L>(own.l * exp_of<T>(own.m - finite_maximum(m)))};
}

template <typename P>
inline void write_stat(P p, SoftmaxState<float> state) {
  p[0] = state.m;
  p[1] = state.l;
}

template <typename P>
inline void read_stat(P p, thread SoftmaxState<float>& state) {
  state = SoftmaxState<float>{p[0], p[1]};
}

}  // namespace mittens
