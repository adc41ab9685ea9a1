// The logarithm and the exponentials by which layers get the gates of their states.
#pragma once

#include "cpu/isa/recurrence/recurrence_rows.h"

namespace mittens::cpu::MITTENS_ISA {

// log(1 + e) for 0 <= e <= 1: twice the artanh of e / (2 + e), which is at most 1 / 3.
template <typename V>
MITTENS_INLINE V log_of_one_plus(V e) {
  const V z = e / (2.0f + e), z2 = z * z;
  V p = V{} + 1.0f / 15;
  p = p * z2 + 1.0f / 13;
  p = p * z2 + 1.0f / 11;
  p = p * z2 + 1.0f / 9;
  p = p * z2 + 1.0f / 7;
  p = p * z2 + 1.0f / 5;
  p = p * z2 + 1.0f / 3;
  return 2 * (p * z2 * z + z);
}

// log(1 + e^x); NaN stays NaN.
MITTENS_INLINE float softplus(float x) {
  return (x > 0 ? x : 0) + log_of_one_plus(exp(x > 0 ? -x : x));
}

MITTENS_INLINE Float softplus(Float x) {
  return (x > 0 ? x : Float{}) + log_of_one_plus(exp(x > 0 ? -x : x));
}

MITTENS_INLINE float sigmoid(float x) {
  return 1.0f / (exp(-x) + 1.0f);
}

MITTENS_INLINE Float sigmoid(Float x) {
  return 1.0f / (exp(-x) + 1.0f);
}

MITTENS_INLINE Float silu(Float x) {
  return x / (exp(-x) + 1.0f);
}

MITTENS_INLINE float number_of(const Numbers& numbers, size_t i) {
  return number(numbers.type, numbers.data, i);
}

}  // namespace mittens::cpu::MITTENS_ISA
