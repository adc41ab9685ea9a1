// The logarithm and the exponentials by which layers get the gates of their states.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace mittens {

// log(1 + e) for 0 <= e <= 1: twice the artanh of e / (2 + e), which is at most 1 / 3.
inline float log_of_one_plus(float e) {
  const float z = e / (2.0f + e);
  const float z2 = z * z;
  float p = 1.0f / 15;
  p = fma(p, z2, 1.0f / 13);
  p = fma(p, z2, 1.0f / 11);
  p = fma(p, z2, 1.0f / 9);
  p = fma(p, z2, 1.0f / 7);
  p = fma(p, z2, 1.0f / 5);
  p = fma(p, z2, 1.0f / 3);
  return 2 * fma(p * z2, z, z);
}

// log(1 + e^x); NaN stays NaN.
inline float softplus(float x) {
  return (x > 0 ? x : 0) + log_of_one_plus(precise::exp(-fabs(x)));
}

inline float sigmoid(float x) {
  return 1.0f / (1.0f + precise::exp(-x));
}

}  // namespace mittens
