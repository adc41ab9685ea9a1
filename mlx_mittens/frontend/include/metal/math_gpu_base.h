// Mathematics that all GPU targets share: constants, and functions that are a few operations on bits.
#pragma once

namespace mittens::math {

constexpr float log2_e = 1.44269504088896340736f;
constexpr float log2_e_rest = 1.92596299112661e-8f;  // log2(e) - log2_e
constexpr float log2_10 = 3.32192809488736234787f;
constexpr float log2_10_rest = 7.0595369e-8f;  // log2(10) - log2_10
constexpr float ln_2 = 0.693147180559945309417f;

MITTENS_INLINE float fabs(float x) {
  return __builtin_fabsf(x);
}
MITTENS_INLINE float rint(float x) {
  return __builtin_rintf(x);
}
MITTENS_INLINE float copysign(float x, float y) {
  return __builtin_copysignf(x, y);
}
MITTENS_INLINE constexpr float fmin(float x, float y) {
  return __builtin_fminf(x, y);
}
MITTENS_INLINE constexpr float fmax(float x, float y) {
  return __builtin_fmaxf(x, y);
}
MITTENS_INLINE float power_of_two(int exponent) {
  return __builtin_bit_cast(float, (exponent + 127) << 23);
}
// In two steps, so that the result may be denormal.
MITTENS_INLINE float ldexp(float x, int exponent) {
  exponent = exponent < -250 ? -250 : exponent > 250 ? 250 : exponent;
  const int half_way = exponent / 2;
  return x * power_of_two(half_way) * power_of_two(exponent - half_way);
}

}  // namespace mittens::math
