// The result of a threadgroup for its part of a row of logits, and how a later launch puts the parts together.
#pragma once

#include <metal_stdlib>

#include "mittens/softmax.h"
#include "params/sampling.h"

using namespace metal;

namespace mittens {

constant constexpr uint partial_size = kSamplePartial;  // best sum, its column, its logit, maximum, sum of exponentials
constant constexpr uint no_column = 0xffffffffu;

// The logarithm of a normal positive number, within 2 ulp.
inline float log_of(float x) {
  const int above = int((as_type<uint>(x) - 0x3f2aaaabu) & 0xff800000u);  // x = 2^e m, m in [2/3, 4/3)
  const float f = as_type<float>(as_type<uint>(x) - uint(above)) - 1.0f;
  const float e = float(above >> 23);
  float p = fma(f, 0x1.1f3fbcp-3f, -0x1.3b28ccp-3f);
  p = fma(p, f, 0x1.1ea2ecp-3f);
  p = fma(p, f, -0x1.5032cep-3f);
  p = fma(p, f, 0x1.99d41ep-3f);
  p = fma(p, f, -0x1.001480p-2f);
  p = fma(p, f, 0x1.5554fap-2f);
  p = fma(p, f, -0x1.ffffd6p-2f);
  const float square = f * f;
  return fma(e, 0x1.62e430p-1f, fma(p, square, f));
}

inline float number(float x) {
  return x == x ? x : -INFINITY;
}

// The token drawn so far.
struct Best {
  float sum;
  uint column;
};

inline bool is_better(float sum, uint column, Best best) {
  return sum > best.sum || (sum == best.sum && column < best.column);
}

inline Best best_of_simdgroup(Best best) {
  const float sum = simd_max(best.sum);
  return Best{sum, simd_min(best.sum == sum ? best.column : no_column)};
}

// The results of a row's threadgroups: the drawn token and its logit, the row's largest logit, and the sum of its
// exponentials below that.
struct Whole {
  Best best;
  float logit;
  float m;
  float sum;
};

template <typename T>
inline Whole whole_of(const device uint* row, uint splits, uint lane) {
  Best best{-INFINITY, no_column};
  float logit = -INFINITY;
  SoftmaxState<float> state{-INFINITY, 0.0f};
  bool has_nan = false;
  for (uint i = lane; i < splits; i += 32) {
    const device uint* partial = row + i * partial_size;
    const float sum = as_type<float>(partial[0]);
    if (is_better(sum, partial[1], best)) {
      best = Best{sum, partial[1]};
      logit = as_type<float>(partial[2]);
    }
    const float m = as_type<float>(partial[3]);
    has_nan = has_nan || !(m == m);
    state = merge<T>(state, SoftmaxState<float>{number(m), as_type<float>(partial[4])});
  }
  Whole whole;
  whole.best = best_of_simdgroup(best);
  whole.logit = simd_max(best.column == whole.best.column ? logit : -INFINITY);
  whole.m = simd_max(state.m);
  whole.sum = simd_sum(state.l * exp_of<T>(state.m - finite_maximum(whole.m)));
  whole.m = simd_max(has_nan ? 1.0f : 0.0f) > 0 ? NAN : whole.m;
  return whole;
}

}  // namespace mittens
