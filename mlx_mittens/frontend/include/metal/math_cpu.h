// Float32 mathematics on the CPU: the C library's, which is within an ulp; there is no faster form to be less exact.
#pragma once

namespace mittens::math {

#define MITTENS_C1(name, function)          \
  MITTENS_INLINE float name(float x) {      \
    return __builtin_##function(x);         \
  }
#define MITTENS_C2(name, function)              \
  MITTENS_INLINE float name(float x, float y) { \
    return __builtin_##function(x, y);          \
  }
#define MITTENS_BOTH(name)           \
  MITTENS_C1(exact_##name, name##f)  \
  MITTENS_C1(fast_##name, name##f)
MITTENS_BOTH(exp)
MITTENS_BOTH(exp2)
MITTENS_BOTH(log)
MITTENS_BOTH(log2)
MITTENS_BOTH(log10)
MITTENS_BOTH(sin)
MITTENS_BOTH(cos)
MITTENS_BOTH(tan)
MITTENS_BOTH(sqrt)
#undef MITTENS_BOTH
MITTENS_C2(exact_pow, powf)
MITTENS_C2(fast_pow, powf)
MITTENS_C2(atan2, atan2f)
MITTENS_C2(fmod, fmodf)
MITTENS_C2(copysign, copysignf)
MITTENS_C1(asin, asinf)
MITTENS_C1(acos, acosf)
MITTENS_C1(atan, atanf)
MITTENS_C1(sinh, sinhf)
MITTENS_C1(cosh, coshf)
MITTENS_C1(asinh, asinhf)
MITTENS_C1(acosh, acoshf)
MITTENS_C1(atanh, atanhf)
MITTENS_C1(floor, floorf)
MITTENS_C1(ceil, ceilf)
MITTENS_C1(trunc, truncf)
MITTENS_C1(rint, rintf)
MITTENS_C1(round, roundf)
MITTENS_C1(fabs, fabsf)
#undef MITTENS_C1
#undef MITTENS_C2

// The float version of glibc is up to 2.1 ulp off.
MITTENS_INLINE float exact_tanh(float x) {
  return float(__builtin_tanh(double(x)));
}
MITTENS_INLINE float fast_tanh(float x) {
  return exact_tanh(x);
}

MITTENS_INLINE float exact_exp10(float x) {
  return __builtin_powf(10.0f, x);
}
MITTENS_INLINE float fast_exp10(float x) {
  return __builtin_powf(10.0f, x);
}
MITTENS_INLINE float exact_rsqrt(float x) {
  return 1.0f / __builtin_sqrtf(x);
}
MITTENS_INLINE float fast_rsqrt(float x) {
  return 1.0f / __builtin_sqrtf(x);
}
MITTENS_INLINE float exact_divide(float x, float y) {
  return x / y;
}
MITTENS_INLINE float fast_divide(float x, float y) {
  return x / y;
}
MITTENS_INLINE constexpr float fmin(float x, float y) {
  return x != x ? y : y < x ? y : x;
}
MITTENS_INLINE constexpr float fmax(float x, float y) {
  return x != x ? y : x < y ? y : x;
}
MITTENS_INLINE float ldexp(float x, int exponent) {
  return __builtin_ldexpf(x, exponent);
}

}  // namespace mittens::math
