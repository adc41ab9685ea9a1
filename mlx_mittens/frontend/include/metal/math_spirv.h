// Float32 mathematics on Apple GPUs. Their exp2, log2, rsqrt and reciprocal are within an ulp or two over the whole
// range, so that exp2 and log2 are the bare instructions in both forms; exact exp, exp10 and log correct the rounding
// error of the multiplication by a constant.
#pragma once

#include "metal/math_gpu_base.h"

// Operations of Mesa's compiler, which takes calls of functions of these names for them.
extern "C" {
float __attribute__((const)) nir_fexp2(float);
float __attribute__((const)) nir_flog2(float);
float __attribute__((const)) nir_frsq(float);
float __attribute__((const)) nir_frcp(float);
float __attribute__((const)) nir_fsqrt(float);
float __attribute__((const)) nir_fsin(float);
float __attribute__((const)) nir_fcos(float);
}

namespace mittens::math {

MITTENS_INLINE float floor(float x) {
  return __builtin_floorf(x);
}
MITTENS_INLINE float ceil(float x) {
  return __builtin_ceilf(x);
}
MITTENS_INLINE float trunc(float x) {
  return __builtin_truncf(x);
}

MITTENS_INLINE float exact_sqrt(float x) {
  return nir_fsqrt(x);
}
MITTENS_INLINE float fast_sqrt(float x) {
  return nir_fsqrt(x);
}
MITTENS_INLINE float exact_rsqrt(float x) {
  return nir_frsq(x);
}
MITTENS_INLINE float fast_rsqrt(float x) {
  return nir_frsq(x);
}
MITTENS_INLINE float fast_divide(float x, float y) {
  return x * nir_frcp(y);
}

MITTENS_INLINE float exact_exp2(float x) {
  return nir_fexp2(x);
}
MITTENS_INLINE float fast_exp2(float x) {
  return nir_fexp2(x);
}
// 2^(x * (factor + factor_rest) + shift), for |x| up to the limit beyond which it is 0 or inf.
MITTENS_INLINE float exp2_of_product(float x, float factor, float factor_rest, float limit, float shift) {
  const float limited = fmax(fmin(x, limit), -limit);
  const float product = limited * factor;
  const float rest = __builtin_fmaf(limited, factor_rest, __builtin_fmaf(limited, factor, -product));
  const float power = nir_fexp2(product + shift);
  return x != x ? x : power * __builtin_fmaf(rest, ln_2, 1.0f);
}
// e^x * 2^shift.
MITTENS_INLINE float exp_scaled(float x, float shift) {
  return exp2_of_product(x, log2_e, log2_e_rest, 130.0f, shift);
}
MITTENS_INLINE float exact_exp10(float x) {
  return exp2_of_product(x, log2_10, log2_10_rest, 60.0f, 0.0f);
}

MITTENS_INLINE float exact_log2(float x) {
  return nir_flog2(x);
}
MITTENS_INLINE float fast_log2(float x) {
  return nir_flog2(x);
}
MITTENS_INLINE float exact_log(float x) {
  constexpr float ln_2_rest = -1.9046543e-9f;  // ln(2) - ln_2
  const float log = nir_flog2(x);
  return __builtin_isinf(log) ? log : __builtin_fmaf(log, ln_2, log * ln_2_rest);
}

MITTENS_INLINE float fast_sin(float x) {
  return nir_fsin(x);
}
MITTENS_INLINE float fast_cos(float x) {
  return nir_fcos(x);
}

}  // namespace mittens::math

#include "metal/math_gpu.h"
