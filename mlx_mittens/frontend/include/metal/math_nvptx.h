// Float32 mathematics on NVIDIA GPUs, from the hardware's approximations of ex2, lg2, sin, cos, rsqrt: the exact forms
// reduce their argument first and are within 2 ulp where the argument is of common size, the fast ones are the bare
// instructions.
#pragma once

namespace mittens::math {

constexpr float log2_e = 1.44269504088896340736f;
constexpr float log2_e_rest = 1.92596299112661e-8f;  // log2(e) - log2_e
constexpr float ln_2 = 0.693147180559945309417f;

MITTENS_INLINE float fabs(float x) {
  return __builtin_fabsf(x);
}
MITTENS_INLINE float floor(float x) {
  return __nvvm_floor_f(x);
}
MITTENS_INLINE float ceil(float x) {
  return __nvvm_ceil_f(x);
}
MITTENS_INLINE float trunc(float x) {
  return __nvvm_trunc_f(x);
}
MITTENS_INLINE float rint(float x) {
  return __builtin_rintf(x);
}
MITTENS_INLINE float copysign(float x, float y) {
  return __builtin_copysignf(x, y);
}
MITTENS_INLINE float round(float x) {
  return trunc(x + copysign(0.49999997f, x));
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

MITTENS_INLINE float exact_sqrt(float x) {
  return __nvvm_sqrt_rn_f(x);
}
MITTENS_INLINE float fast_sqrt(float x) {
  return __nvvm_sqrt_approx_f(x);
}
MITTENS_INLINE float exact_rsqrt(float x) {
  return __nvvm_rsqrt_approx_f(x);
}
MITTENS_INLINE float fast_rsqrt(float x) {
  return __nvvm_rsqrt_approx_f(x);
}
MITTENS_INLINE float exact_divide(float x, float y) {
  return x / y;
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
MITTENS_INLINE float exact_exp(float x) {
  const float limited = fmax(fmin(x, 130.0f), -130.0f);
  const float whole = rint(limited * log2_e);
  const float part = __builtin_fmaf(limited, log2_e_rest, __builtin_fmaf(limited, log2_e, -whole));
  return x != x ? x : exp2_of(whole, part);
}
MITTENS_INLINE float fast_exp2(float x) {
  return __nvvm_ex2_approx_ftz_f(x);
}
MITTENS_INLINE float fast_exp(float x) {
  return __nvvm_ex2_approx_ftz_f(x * log2_e);
}
MITTENS_INLINE float fast_log2(float x) {
  return __nvvm_lg2_approx_ftz_f(x);
}
MITTENS_INLINE float fast_log(float x) {
  return __nvvm_lg2_approx_ftz_f(x) * ln_2;
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
MITTENS_INLINE float exact_log10(float x) {
  return exact_log(x) * 0.434294481903251827651f;
}
MITTENS_INLINE float fast_log10(float x) {
  return fast_log2(x) * 0.301029995663981195214f;
}
MITTENS_INLINE float exact_exp10(float x) {
  const float whole = rint(x * 3.32192809488736234787f);
  const float part = __builtin_fmaf(x, 3.32192809488736234787f, -whole);
  return exp2_of(fmax(fmin(whole, 200.0f), -200.0f), part);
}
MITTENS_INLINE float fast_exp10(float x) {
  return fast_exp2(x * 3.32192809488736234787f);
}

MITTENS_INLINE float exact_pow(float x, float y) {
  const float magnitude = exact_exp2(y * exact_log2(fabs(x)));
  const bool whole = y == trunc(y);
  const bool odd = whole && fabs(y) < 16777216.0f && (int(y) & 1);
  return y == 0.0f || x == 1.0f ? 1.0f : x < 0.0f && !whole ? __builtin_nanf("") : odd ? copysign(magnitude, x) : magnitude;
}
MITTENS_INLINE float fast_pow(float x, float y) {
  return fast_exp2(y * fast_log2(x));
}

// The nearest multiple of pi/2 is taken off in two parts; good to about 10^5.
MITTENS_INLINE float off_quarters(float x, int& quarter) {
  const float whole = rint(x * 0.636619772367581343f);
  quarter = int(whole);
  return __builtin_fmaf(whole, 4.37113883e-8f, __builtin_fmaf(whole, -1.57079637f, x));
}
MITTENS_INLINE float sine_near_zero(float x) {
  const float z = x * x;
  return x + x * z * (-0.16666654611f + z * (0.83321608736e-2f + z * -0.19515295891e-3f));
}
MITTENS_INLINE float cosine_near_zero(float x) {
  const float z = x * x;
  return 1.0f - 0.5f * z + z * z * (0.41666645683e-1f + z * (-0.13887316255e-2f + z * 0.24433157117e-4f));
}
MITTENS_INLINE float exact_sin(float x) {
  int quarter;
  const float rest = off_quarters(x, quarter);
  const float value = quarter & 1 ? cosine_near_zero(rest) : sine_near_zero(rest);
  return quarter & 2 ? -value : value;
}
MITTENS_INLINE float exact_cos(float x) {
  int quarter;
  const float rest = off_quarters(x, quarter);
  const float value = quarter & 1 ? sine_near_zero(rest) : cosine_near_zero(rest);
  return (quarter + 1) & 2 ? -value : value;
}
MITTENS_INLINE float exact_tan(float x) {
  return exact_sin(x) / exact_cos(x);
}
MITTENS_INLINE float fast_sin(float x) {
  return __nvvm_sin_approx_ftz_f(x);
}
MITTENS_INLINE float fast_cos(float x) {
  return __nvvm_cos_approx_ftz_f(x);
}
MITTENS_INLINE float fast_tan(float x) {
  return fast_sin(x) / fast_cos(x);
}

// (e^2x - 1) / (e^2x + 1); its series near 0, where the difference cancels.
MITTENS_INLINE float exact_tanh(float x) {
  const float a = fabs(x);
  const float z = x * x;
  const float small = x + x * z * (-0.333332819f + z * (0.133214056f + z * (-0.0526912487f + z * 0.0165043678f)));
  const float large = 1.0f - 2.0f / (exact_exp(2.0f * a) + 1.0f);
  return a < 0.55f ? small : copysign(large, x);
}
MITTENS_INLINE float fast_tanh(float x) {
  return exact_tanh(x);
}
MITTENS_INLINE float sinh(float x) {
  const float a = fabs(x);
  const float z = x * x;
  const float small = x + x * z * (1.0f / 6 + z * (1.0f / 120 + z * (1.0f / 5040)));
  const float e = exact_exp(a);
  return a < 0.5f ? small : copysign(0.5f * e - 0.5f / e, x);
}
MITTENS_INLINE float cosh(float x) {
  const float e = exact_exp(fabs(x));
  return 0.5f * e + 0.5f / e;
}
MITTENS_INLINE float atan_to_one(float x) {
  const float z = x * x;
  return x + x * z *
                 (-0.333331466f +
                  z * (0.199937075f + z * (-0.142102316f + z * (0.106590636f + z * (-0.0756163523f +
                                                                              z * (0.0436734334f + z * (-0.0163945779f + z * 0.00290188054f)))))));
}
MITTENS_INLINE float atan(float x) {
  const float a = fabs(x);
  const float near = atan_to_one(a > 1.0f ? 1.0f / a : a);
  return copysign(a > 1.0f ? 1.57079632679489661923f - near : near, x);
}
MITTENS_INLINE float atan2(float y, float x) {
  const float quotient = fabs(x) == fabs(y) && x != 0.0f ? 1.0f : fabs(y) / fabs(x);
  const float angle = x == 0.0f && y == 0.0f ? 0.0f : atan(quotient);
  return copysign(__builtin_signbit(x) ? 3.14159265358979323846f - angle : angle, y);
}
MITTENS_INLINE float asin(float x) {
  return atan2(x, exact_sqrt((1.0f - x) * (1.0f + x)));
}
MITTENS_INLINE float acos(float x) {
  return atan2(exact_sqrt((1.0f - x) * (1.0f + x)), x);
}
MITTENS_INLINE float asinh(float x) {
  const float a = fabs(x);
  return copysign(exact_log(a + exact_sqrt(a * a + 1.0f)), x);
}
MITTENS_INLINE float acosh(float x) {
  return exact_log(x + exact_sqrt((x - 1.0f) * (x + 1.0f)));
}
MITTENS_INLINE float atanh(float x) {
  return 0.5f * exact_log((1.0f + x) / (1.0f - x));
}
MITTENS_INLINE float fmod(float x, float y) {
  return x - y * trunc(x / y);
}

}  // namespace mittens::math
