// Float32 mathematics that a GPU target builds from its own trunc, exp2, exp_scaled, log, sqrt, sin and cos, which come
// first.
#pragma once

namespace mittens::math {

MITTENS_INLINE float round(float x) {
  return trunc(x + copysign(0.49999997f, x));
}
MITTENS_INLINE float exact_divide(float x, float y) {
  return x / y;
}
MITTENS_INLINE float exact_exp(float x) {
  return exp_scaled(x, 0.0f);
}
MITTENS_INLINE float fast_exp(float x) {
  return fast_exp2(x * log2_e);
}
MITTENS_INLINE float fast_exp10(float x) {
  return fast_exp2(x * log2_10);
}
MITTENS_INLINE float fast_log(float x) {
  return fast_log2(x) * ln_2;
}
MITTENS_INLINE float exact_log10(float x) {
  return exact_log(x) * 0.434294481903251827651f;
}
MITTENS_INLINE float fast_log10(float x) {
  return fast_log2(x) * 0.301029995663981195214f;
}
MITTENS_INLINE float exact_pow(float x, float y) {
  const float magnitude = exact_exp2(y * exact_log2(fabs(x)));
  const bool whole = y == trunc(y);
  const bool odd = whole && fabs(y) < 16777216.0f && (int(y) & 1);
  if (y == 0.0f || x == 1.0f) {
    return 1.0f;
  }
  return x < 0.0f && !whole ? __builtin_nanf("") : odd ? copysign(magnitude, x) : magnitude;
}
MITTENS_INLINE float fast_pow(float x, float y) {
  return fast_exp2(y * fast_log2(x));
}

// The nearest multiple of pi/2 is taken off in three parts; good to about 10^4.
MITTENS_INLINE float off_quarters(float x, int& quarter) {
  const float whole = rint(x * 0.636619772367581343f);
  quarter = int(whole);
  const float rest = __builtin_fmaf(whole, 4.37113883e-8f, __builtin_fmaf(whole, -1.57079637f, x));
  return __builtin_fmaf(whole, 1.71512451e-15f, rest);
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
MITTENS_INLINE float fast_tan(float x) {
  return fast_sin(x) / fast_cos(x);
}

// 1 + x rounds; the quotient corrects for the bits lost.
MITTENS_INLINE float log1p(float x) {
  const float sum = 1.0f + x;
  return sum == 1.0f || sum == __builtin_inff() ? x : exact_log(sum) * (x / (sum - 1.0f));
}

// x + x^3 p(x^2), p least in its relative error where it is used.
template <typename... C>
MITTENS_INLINE float odd_series(float x, C... coefficients) {
  const float z = x * x;
  const float c[] = {coefficients...};
  float sum = 0.0f;
  for (int i = sizeof...(C) - 1; i >= 0; --i) {
    sum = __builtin_fmaf(sum, z, c[i]);
  }
  return __builtin_fmaf(x * z, sum, x);
}

// 1 - 2 / (e^2x + 1), which cancels near 0.
MITTENS_INLINE float exact_tanh(float x) {
  const float a = fabs(x);
  const float near =
      odd_series(x, -0.333333327f, 0.133332937f, -0.0539596501f, 0.021782825f, -0.00841395525f, 0.00239581985f);
  const float far = 1.0f - 2.0f / (exact_exp(2.0f * a) + 1.0f);
  return a < 0.55f ? near : copysign(far, x);
}
MITTENS_INLINE float fast_tanh(float x) {
  return exact_tanh(x);
}
MITTENS_INLINE float sinh(float x) {
  const float a = fabs(x);
  const float near = odd_series(x, 0.166666665f, 0.00833335006f, 0.000198361597f, 2.81695137e-06f);
  const float e = exp_scaled(a, -1.0f);  // e^a / 2, which is finite for as long as the result is
  return a < 1.0f ? near : copysign(e - 0.25f / e, x);
}
MITTENS_INLINE float cosh(float x) {
  const float e = exp_scaled(fabs(x), -1.0f);
  return e + 0.25f / e;
}
MITTENS_INLINE float atan(float x) {
  const float a = fabs(x);
  const float near = odd_series(a > 1.0f ? 1.0f / a : a, -0.333332991f, 0.199985482f, -0.142642408f, 0.109521811f,
                                -0.0840343663f, 0.0579573592f, -0.0311776126f, 0.0109144808f, -0.00179359385f);
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
  const float near = log1p(a + a * a / (1.0f + exact_sqrt(a * a + 1.0f)));
  return copysign(a < 1e9f ? near : exact_log(a) + ln_2, x);
}
MITTENS_INLINE float acosh(float x) {
  const float over = x - 1.0f;
  return x < 1e9f ? log1p(over + exact_sqrt(2.0f * over + over * over)) : exact_log(x) + ln_2;
}
MITTENS_INLINE float atanh(float x) {
  const float a = fabs(x);
  return copysign(0.5f * log1p(2.0f * a / (1.0f - a)), x);
}
MITTENS_INLINE float fmod(float x, float y) {
  return x - y * trunc(x / y);
}

}  // namespace mittens::math
