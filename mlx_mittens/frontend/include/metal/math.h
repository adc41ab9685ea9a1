// Mathematics: metal::, metal::precise:: and metal::fast::, over half, bfloat, float and their vectors, in float32.
#pragma once

#ifdef __SPIRV__
#include "metal/math_spirv.h"
#elif defined(__NVPTX__)
#include "metal/math_nvptx.h"
#else
#include "metal/math_cpu.h"
#endif

namespace mittens::math {

// Of x half turns: the quarters are taken off before pi comes in, which no float is.
#define MITTENS_HALF_TURNS(prefix)                                         \
  MITTENS_INLINE float prefix##_sinpi(float x) {                           \
    const float turn = x - 2.0f * rint(0.5f * x);                          \
    const float quarter = rint(2.0f * turn);                               \
    const float rest = (turn - 0.5f * quarter) * 3.14159265358979f;        \
    const bool odd = fabs(quarter) == 1.0f;                                \
    if (rest == 0.0f && !odd) {                                            \
      return copysign(0.0f, x);                                            \
    }                                                                      \
    const float value = odd ? prefix##_cos(rest) : prefix##_sin(rest);     \
    return quarter == -1.0f || fabs(quarter) == 2.0f ? -value : value;     \
  }                                                                        \
  MITTENS_INLINE float prefix##_cospi(float x) {                           \
    const float turn = fabs(x - 2.0f * rint(0.5f * x));                    \
    const float quarter = rint(2.0f * turn);                               \
    const float rest = (turn - 0.5f * quarter) * 3.14159265358979f;        \
    if (quarter == 1.0f) {                                                 \
      return prefix##_sin(-rest) + 0.0f;                                   \
    }                                                                      \
    return quarter == 2.0f ? -prefix##_cos(rest) : prefix##_cos(rest);     \
  }                                                                        \
  MITTENS_INLINE float prefix##_tanpi(float x) {                           \
    return prefix##_sinpi(x) / prefix##_cospi(x);                          \
  }                                                                        \
  MITTENS_INLINE float prefix##_powr(float x, float y) {                   \
    return x < 0.0f ? __builtin_nanf("") : prefix##_pow(fabs(x), y);       \
  }
MITTENS_HALF_TURNS(exact)
MITTENS_HALF_TURNS(fast)
#undef MITTENS_HALF_TURNS

}  // namespace mittens::math

#include "metal/math_arguments.h"

namespace metal {

#define MITTENS_UNARY(name, exact)                                                                  \
  template <typename T, typename = mittens::FloatOnly<T>>                                           \
  MITTENS_INLINE T name(T x) {                                                                      \
    return mittens::map<T>([](auto x) { return decltype(x)(mittens::math::exact(float(x))); }, x);  \
  }                                                                                                 \
  MITTENS_MIXED1(name)
#define MITTENS_BINARY(name, exact)                                                                 \
  template <typename T, typename = mittens::FloatOnly<T>>                                           \
  MITTENS_INLINE constexpr T name(T x, T y) {                                                       \
    return mittens::map<T>(                                                                         \
        [](auto x, auto y) { return decltype(x)(mittens::math::exact(float(x), float(y))); }, x, y); \
  }                                                                                                 \
  MITTENS_MIXED2(name, true)
// The functions whose fast forms differ are written for each namespace; the others stand once and are shared.
#define MITTENS_BY_PRECISION(prefix)   \
  MITTENS_UNARY(exp, prefix##exp)      \
  MITTENS_UNARY(exp2, prefix##exp2)    \
  MITTENS_UNARY(exp10, prefix##exp10)  \
  MITTENS_UNARY(log, prefix##log)      \
  MITTENS_UNARY(log2, prefix##log2)    \
  MITTENS_UNARY(log10, prefix##log10)  \
  MITTENS_UNARY(sin, prefix##sin)      \
  MITTENS_UNARY(cos, prefix##cos)      \
  MITTENS_UNARY(tan, prefix##tan)      \
  MITTENS_UNARY(tanh, prefix##tanh)    \
  MITTENS_UNARY(sinpi, prefix##sinpi)  \
  MITTENS_UNARY(cospi, prefix##cospi)  \
  MITTENS_UNARY(tanpi, prefix##tanpi)  \
  MITTENS_UNARY(sqrt, prefix##sqrt)    \
  MITTENS_UNARY(rsqrt, prefix##rsqrt)  \
  MITTENS_BINARY(divide, prefix##divide) \
  MITTENS_BINARY(pow, prefix##pow)     \
  MITTENS_BINARY(powr, prefix##powr)

MITTENS_BY_PRECISION(exact_)
namespace precise {
MITTENS_BY_PRECISION(exact_)
}
namespace fast {
MITTENS_BY_PRECISION(fast_)
}
#undef MITTENS_BY_PRECISION

MITTENS_UNARY(asin, asin)
MITTENS_UNARY(acos, acos)
MITTENS_UNARY(atan, atan)
MITTENS_UNARY(sinh, sinh)
MITTENS_UNARY(cosh, cosh)
MITTENS_UNARY(asinh, asinh)
MITTENS_UNARY(acosh, acosh)
MITTENS_UNARY(atanh, atanh)
MITTENS_UNARY(floor, floor)
MITTENS_UNARY(ceil, ceil)
MITTENS_UNARY(trunc, trunc)
MITTENS_UNARY(rint, rint)
MITTENS_UNARY(round, round)
MITTENS_UNARY(fabs, fabs)
MITTENS_BINARY(atan2, atan2)
MITTENS_BINARY(fmod, fmod)
MITTENS_BINARY(fmin, fmin)
MITTENS_BINARY(fmax, fmax)
MITTENS_BINARY(copysign, copysign)
#undef MITTENS_UNARY
#undef MITTENS_BINARY

template <typename T, typename = mittens::NoObject<T>>
MITTENS_INLINE T abs(T x) {
  if constexpr (mittens::is_float<T>) {
    return fabs(x);
  } else {
    return mittens::map<T>([](auto x) { return x < 0 ? decltype(x)(-x) : x; }, x);
  }
}

// Of a number and a NaN the number, as fmin and fmax; of integers the order of their type.
template <typename T, typename = mittens::NoObject<T>>
MITTENS_INLINE constexpr T min(T x, T y) {
  if constexpr (mittens::is_float<T>) {
    return fmin(x, y);
  } else {
    return mittens::map<T>([](auto x, auto y) { return y < x ? y : x; }, x, y);
  }
}
template <typename T, typename = mittens::NoObject<T>>
MITTENS_INLINE constexpr T max(T x, T y) {
  if constexpr (mittens::is_float<T>) {
    return fmax(x, y);
  } else {
    return mittens::map<T>([](auto x, auto y) { return x < y ? y : x; }, x, y);
  }
}
template <typename T, typename = mittens::NoObject<T>>
MITTENS_INLINE constexpr T min3(T x, T y, T z) {
  return min(x, min(y, z));
}
template <typename T, typename = mittens::NoObject<T>>
MITTENS_INLINE constexpr T max3(T x, T y, T z) {
  return max(x, max(y, z));
}
template <typename T, typename = mittens::NoObject<T>>
MITTENS_INLINE constexpr T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <typename T, typename = mittens::NoObject<T>>
MITTENS_INLINE constexpr T median3(T x, T y, T z) {
  return max(min(x, y), min(max(x, y), z));
}
#define MITTENS_FLOATS3(name, function)                           \
  template <typename T, typename = mittens::FloatOnly<T>>         \
  MITTENS_INLINE constexpr T name(T x, T y, T z) {                \
    return function(x, y, z);                                     \
  }
MITTENS_FLOATS3(fmin3, min3)
MITTENS_FLOATS3(fmax3, max3)
MITTENS_FLOATS3(fmedian3, median3)
#undef MITTENS_FLOATS3
MITTENS_MIXED1(abs)
MITTENS_MIXED2(min, false)
MITTENS_MIXED2(max, false)
MITTENS_MIXED3(min3, false)
MITTENS_MIXED3(max3, false)
MITTENS_MIXED3(median3, false)
MITTENS_MIXED3(clamp, false)

template <typename T, typename = mittens::FloatOnly<T>>
MITTENS_INLINE T fma(T x, T y, T z) {
  return mittens::map<T>(
      [](auto x, auto y, auto z) { return decltype(x)(__builtin_fmaf(float(x), float(y), float(z))); }, x, y, z);
}
template <typename T, typename = mittens::FloatOnly<T>>
MITTENS_INLINE T saturate(T x) {
  return clamp(x, T(0), T(1));
}
template <typename T, typename = mittens::FloatOnly<T>>
MITTENS_INLINE T mix(T x, T y, T a) {
  return x + (y - x) * a;
}
template <typename T, typename = mittens::FloatOnly<T>>
MITTENS_INLINE T step(T edge, T x) {
  return mittens::map<T>([](auto edge, auto x) { return decltype(x)(x < edge ? 0 : 1); }, edge, x);
}
template <typename T, typename = mittens::FloatOnly<T>>
MITTENS_INLINE T smoothstep(T low, T high, T x) {
  const T t = saturate((x - low) / (high - low));
  return t * t * (T(3) - T(2) * t);
}
template <typename T, typename = mittens::FloatOnly<T>>
MITTENS_INLINE T sign(T x) {
  return mittens::map<T>(
      [](auto x) {
        using S = decltype(x);
        return x > 0 ? S(1) : x < 0 ? S(-1) : x == x ? x : S(0);
      },
      x);
}
template <typename T, typename = mittens::FloatOnly<T>>
MITTENS_INLINE T fract(T x) {
  const T rest = x - floor(x);  // of a number just below a whole one it rounds to 1
  return mittens::map<T>(
      [](auto rest) {
        using E = decltype(rest);
        return rest < E(1) || rest != rest ? rest : E(1) - numeric_limits<E>::epsilon() / E(2);
      },
      rest);
}
template <typename T, typename = mittens::FloatOnly<T>>
MITTENS_INLINE T fdim(T x, T y) {
  return mittens::map<T>([](auto x, auto y) { return x > y ? decltype(x)(x - y) : decltype(x)(0); }, x, y);
}
template <typename T, typename = enable_if_t<mittens::is_float<T> && mittens::has_math<T> && !mittens::Vector<T>::is_vector>>
MITTENS_INLINE T ldexp(T x, int exponent) {
  return T(mittens::math::ldexp(float(x), exponent));
}
template <typename T, typename M = mittens::mixed_t<true, T>>
MITTENS_INLINE M ldexp(T x, int exponent) {
  return ldexp(M(x), exponent);
}
template <typename T, typename = mittens::FloatOnly<T>>
MITTENS_INLINE T modf(T x, T& whole) {
  whole = trunc(x);
  return x - whole;
}
template <typename T, typename = mittens::FloatOnly<T>>
MITTENS_INLINE T sincos(T x, T& cosine) {
  cosine = cos(x);
  return sin(x);
}

// The integers that belong to a floating-point number or vector.
template <typename T>
MITTENS_INLINE constexpr auto whole_numbers_of() {
  if constexpr (mittens::Vector<T>::is_vector) {
    return vec<int, mittens::Vector<T>::size>{};
  } else {
    return int{};
  }
}
template <typename T>
using whole_t = decltype(whole_numbers_of<T>());

template <typename T, typename = mittens::FloatOnly<T>>
MITTENS_INLINE whole_t<T> ilogb(T x) {
  return mittens::map<whole_t<T>>(
      [](auto x) {
        const uint bits = as_type<uint>(float(x)) & 0x7fffffff;
        const int exponent = int(bits >> 23);
        if (bits == 0 || bits > 0x7f800000) {
          return -2147483647 - 1;
        }
        return exponent == 255 ? 2147483647 : exponent == 0 ? -118 - __builtin_clz(bits) : exponent - 127;
      },
      x);
}
template <typename T, typename = enable_if_t<mittens::is_float<T> && mittens::has_math<T> && !mittens::Vector<T>::is_vector>>
MITTENS_INLINE T frexp(T x, int& exponent) {
  const float value = float(x);
  const bool plain = value != 0.0f && value - value == 0.0f;
  exponent = plain ? ilogb(value) + 1 : 0;
  return plain ? T(mittens::math::ldexp(value, -exponent)) : x;
}
template <typename T, typename = enable_if_t<mittens::is_float<T> && mittens::has_math<T> && mittens::Vector<T>::is_vector>>
MITTENS_INLINE T frexp(T x, whole_t<T>& exponent) {
  T result;
  for (int i = 0; i < mittens::Vector<T>::size; ++i) {
    int power;
    result[i] = frexp(mittens::Element<T>(x[i]), power);
    exponent[i] = power;
  }
  return result;
}
template <typename T, typename = enable_if_t<mittens::is_float<T> && mittens::has_math<T> && mittens::Vector<T>::is_vector>>
MITTENS_INLINE T ldexp(T x, whole_t<T> exponent) {
  return mittens::map<T>([](auto x, auto power) { return ldexp(x, int(power)); }, x, exponent);
}
template <typename T, typename = enable_if_t<__is_same(T, float) || __is_same(T, half)>>
MITTENS_INLINE T nextafter(T x, T y) {
  using Bits = conditional_t<sizeof(T) == 4, uint, ushort>;
  if (x != x || y != y) {
    return x + y;
  }
  if (x == y) {
    return y;
  }
  if (x == T(0)) {
    return y > x ? as_type<T>(Bits(1)) : -as_type<T>(Bits(1));
  }
  const bool away = (y > x) == (x > T(0));
  return as_type<T>(Bits(as_type<Bits>(x) + (away ? 1 : -1)));
}

MITTENS_MIXED3(fma, true)
MITTENS_MIXED3(mix, true)
MITTENS_MIXED2(step, true)
MITTENS_MIXED3(smoothstep, true)
MITTENS_MIXED2(fdim, true)
MITTENS_MIXED1(saturate)
MITTENS_MIXED1(sign)
MITTENS_MIXED1(fract)

// A bfloat is tested as the float that it becomes.
#define MITTENS_TEST(name, test)                                    \
  template <typename T, typename = enable_if_t<mittens::is_float<T> && (mittens::has_math<T> || __is_arithmetic(T))>> \
  MITTENS_INLINE mittens::Truth<T> name(T x) {                      \
    if constexpr (mittens::Vector<T>::is_vector) {                  \
      mittens::Truth<T> result = {};                                \
      for (int i = 0; i < mittens::Vector<T>::size; ++i) {          \
        const float element = float(x[i]);                          \
        result[i] = test;                                           \
      }                                                             \
      return result;                                                \
    } else {                                                        \
      const float element = float(x);                               \
      return test;                                                  \
    }                                                               \
  }
MITTENS_TEST(isnan, __builtin_isnan(element))
MITTENS_TEST(isinf, __builtin_isinf(element))
MITTENS_TEST(isfinite, __builtin_isfinite(element))
MITTENS_TEST(isnormal, __builtin_isnormal(element) &&
                           (!__is_same(mittens::Element<T>, half) || __builtin_fabsf(element) >= 0x1p-14f))
MITTENS_TEST(signbit, __builtin_signbit(element))
#undef MITTENS_TEST
MITTENS_OBJECTS(isnan)
MITTENS_OBJECTS(isinf)
MITTENS_OBJECTS(isfinite)
MITTENS_OBJECTS(isnormal)
MITTENS_OBJECTS(signbit)

// A truth is a bool, a vector of bool, or the result of comparing vectors (integers, all ones where true).
template <typename M>
MITTENS_INLINE constexpr bool any(M mask) {
  if constexpr (mittens::is_class<M>) {
    return any(mittens::construct<mittens::plain_t<M>>(mask));
  } else if constexpr (mittens::Vector<M>::is_vector) {
    bool result = false;
    for (int i = 0; i < mittens::Vector<M>::size; ++i) {
      result = result || mask[i];
    }
    return result;
  } else {
    return mask;
  }
}
template <typename M>
MITTENS_INLINE constexpr bool all(M mask) {
  if constexpr (mittens::is_class<M>) {
    return all(mittens::construct<mittens::plain_t<M>>(mask));
  } else if constexpr (mittens::Vector<M>::is_vector) {
    bool result = true;
    for (int i = 0; i < mittens::Vector<M>::size; ++i) {
      result = result && mask[i];
    }
    return result;
  } else {
    return mask;
  }
}
template <typename T, typename M>
MITTENS_INLINE constexpr T select(T no, T yes, M mask) {
  return mittens::map<T>([](auto no, auto yes, auto mask) { return mask ? yes : no; }, no, yes, mask);
}

template <typename T, typename = mittens::FloatOnly<T>>
MITTENS_INLINE mittens::Truth<T> isunordered(T x, T y) {
  return isnan(x) || isnan(y);
}
template <typename T, typename = mittens::FloatOnly<T>>
MITTENS_INLINE mittens::Truth<T> isordered(T x, T y) {
  return !isunordered(x, y);
}

}  // namespace metal

#include "metal/geometry.h"

namespace metal {

#define MITTENS_SHARED \
  using metal::abs; \
  using metal::acos; \
  using metal::acosh; \
  using metal::asin; \
  using metal::asinh; \
  using metal::atan; \
  using metal::atan2; \
  using metal::atanh; \
  using metal::ceil; \
  using metal::clamp; \
  using metal::copysign; \
  using metal::cosh; \
  using metal::cross; \
  using metal::distance; \
  using metal::distance_squared; \
  using metal::dot; \
  using metal::fabs; \
  using metal::fdim; \
  using metal::faceforward; \
  using metal::floor; \
  using metal::fma; \
  using metal::fmax; \
  using metal::fmax3; \
  using metal::fmedian3; \
  using metal::fmin; \
  using metal::fmin3; \
  using metal::fmod; \
  using metal::fract; \
  using metal::frexp; \
  using metal::ilogb; \
  using metal::ldexp; \
  using metal::length; \
  using metal::length_squared; \
  using metal::max; \
  using metal::max3; \
  using metal::median3; \
  using metal::min; \
  using metal::min3; \
  using metal::mix; \
  using metal::modf; \
  using metal::nextafter; \
  using metal::normalize; \
  using metal::reflect; \
  using metal::refract; \
  using metal::rint; \
  using metal::round; \
  using metal::saturate; \
  using metal::sign; \
  using metal::sincos; \
  using metal::sinh; \
  using metal::smoothstep; \
  using metal::step; \
  using metal::trunc; \
  using metal::isfinite; \
  using metal::isinf; \
  using metal::isnan; \
  using metal::isnormal; \
  using metal::isordered; \
  using metal::isunordered; \
  using metal::signbit;
namespace precise {
MITTENS_SHARED
}  // namespace precise
namespace fast {
MITTENS_SHARED
}  // namespace fast
#undef MITTENS_SHARED
#undef MITTENS_MIXED1
#undef MITTENS_MIXED2
#undef MITTENS_MIXED3
#undef MITTENS_OBJECTS

}  // namespace metal
