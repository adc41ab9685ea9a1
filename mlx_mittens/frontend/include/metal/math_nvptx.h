// Float32 mathematics on NVIDIA GPUs, from the hardware's approximations of ex2, lg2, sin, cos, rsqrt: the exact forms
// reduce their argument first and are within 2 ulp where the argument is of common size, the fast ones are the bare
// instructions.
#pragma once

#include "metal/math_gpu_base.h"

namespace mittens::math {

MITTENS_INLINE float floor(float x) {
  return __nvvm_floor_f(x);
}
MITTENS_INLINE float ceil(float x) {
  return __nvvm_ceil_f(x);
}
MITTENS_INLINE float trunc(float x) {
  return __nvvm_trunc_f(x);
}
MITTENS_INLINE float exact_sqrt(float x) {
  return __nvvm_sqrt_rn_f(x);
}
MITTENS_INLINE float fast_sqrt(float x) {
  return __nvvm_sqrt_approx_f(x);
}
// A step of Newton's after the instruction, which alone is off by more than a unit. Of 0, infinity and NaN the step has
// no number.
MITTENS_INLINE float exact_rsqrt(float x) {
  const float y = __nvvm_rsqrt_approx_f(x);
  const float rest = __builtin_fmaf(-x * y, y, 1.0f);
  const float better = __builtin_fmaf(0.5f * y, rest, y);
  return better == better ? better : y;
}
MITTENS_INLINE float fast_rsqrt(float x) {
  return __nvvm_rsqrt_approx_f(x);
}
MITTENS_INLINE float fast_divide(float x, float y) {
  return __nvvm_div_approx_f(x, y);
}

// 2^(whole + part), |part| <= 1/2: the hardware's ex2 is then within 2^-22.
MITTENS_INLINE float exp2_of(float whole, float part) {
  return ldexp(__nvvm_ex2_approx_f(part), int(whole));
}
MITTENS_INLINE float exact_exp2(float x) {
  const float limited = fmax(fmin(x, 200.0f), -200.0f);
  const float whole = rint(limited);
  return x != x ? x : exp2_of(whole, limited - whole);
}
// e^x * 2^shift.
MITTENS_INLINE float exp_scaled(float x, float shift) {
  const float limited = fmax(fmin(x, 130.0f), -130.0f);
  const float whole = rint(limited * log2_e);
  const float part = __builtin_fmaf(limited, log2_e_rest, __builtin_fmaf(limited, log2_e, -whole));
  return x != x ? x : exp2_of(whole + shift, part);
}
MITTENS_INLINE float fast_exp2(float x) {
  return __nvvm_ex2_approx_ftz_f(x);
}
MITTENS_INLINE float fast_log2(float x) {
  return __nvvm_lg2_approx_ftz_f(x);
}

// x = 2^whole * m with m in [sqrt(1/2), sqrt(2)); log(m) = 2 atanh((m - 1) / (m + 1)), a series in its square.
MITTENS_INLINE float exact_log(float x) {
  const bool denormal = x < 0x1p-126f;
  const float scaled = denormal ? x * 0x1p24f : x;
  const int bits = __builtin_bit_cast(int, scaled);
  const int shift = (bits - 0x3f3504f3) >> 23;
  const float m = __builtin_bit_cast(float, bits - (shift << 23));
  const float whole = float(shift) - (denormal ? 24.0f : 0.0f);
  const float f = m - 1.0f;
  const float s = f / (2.0f + f);
  const float z = s * s;
  const float r = z * (0.66666662693f + z * (0.40000972152f + z * (0.28498786688f + z * 0.24279078841f)));
  const float half_square = 0.5f * f * f;
  const float result = whole * 0.693138123f + (f - (half_square - (s * (half_square + r) + whole * 9.05800061e-06f)));
  return x > 0.0f ? (x == __builtin_inff() ? x : result) : x == 0.0f ? -__builtin_inff() : __builtin_nanf("");
}
MITTENS_INLINE float exact_log2(float x) {
  const float log = exact_log(x);
  return __builtin_fmaf(log, log2_e, log * log2_e_rest);
}
MITTENS_INLINE float exact_exp10(float x) {
  const float limited = fmax(fmin(x, 60.0f), -60.0f);
  const float whole = rint(limited * log2_10);
  const float part = __builtin_fmaf(limited, log2_10_rest, __builtin_fmaf(limited, log2_10, -whole));
  return x != x ? x : exp2_of(whole, part);
}
MITTENS_INLINE float fast_sin(float x) {
  return __nvvm_sin_approx_ftz_f(x);
}
MITTENS_INLINE float fast_cos(float x) {
  return __nvvm_cos_approx_ftz_f(x);
}

}  // namespace mittens::math

#include "metal/math_gpu.h"
