// Mathematics: metal::, metal::precise:: and metal::fast::, over half, bfloat, float and their vectors, in float32.
#pragma once

#ifdef __SPIRV__
#include "metal/math_spirv.h"
#elif defined(__NVPTX__)
#include "metal/math_nvptx.h"
#else
#include "metal/math_cpu.h"
#endif

namespace mittens {

template <typename T>
constexpr bool is_float = __is_same(Element<T>, float) || __is_same(Element<T>, half) || __is_same(Element<T>, bfloat);
template <typename T>
using FloatOnly = metal::enable_if_t<is_float<T>>;
template <typename T>
using Truth = metal::conditional_t<Vector<T>::is_vector, bool __attribute__((ext_vector_type(Vector<T>::size))), bool>;

}  // namespace mittens

namespace metal {

#define MITTENS_UNARY(name, exact)                                                                  \
  template <typename T, typename = mittens::FloatOnly<T>>                                           \
  MITTENS_INLINE T name(T x) {                                                                      \
    return mittens::map<T>([](auto x) { return decltype(x)(mittens::math::exact(float(x))); }, x);  \
  }
#define MITTENS_BINARY(name, exact)                                                                 \
  template <typename T, typename = mittens::FloatOnly<T>>                                           \
  MITTENS_INLINE constexpr T name(T x, T y) {                                                       \
    return mittens::map<T>(                                                                         \
        [](auto x, auto y) { return decltype(x)(mittens::math::exact(float(x), float(y))); }, x, y); \
  }

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
  MITTENS_UNARY(sqrt, prefix##sqrt)    \
  MITTENS_UNARY(rsqrt, prefix##rsqrt)  \
  MITTENS_BINARY(divide, prefix##divide) \
  MITTENS_BINARY(pow, prefix##pow)     \
  MITTENS_BINARY(powr, prefix##pow)

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

template <typename T>
MITTENS_INLINE T abs(T x) {
  if constexpr (mittens::is_float<T>) {
    return fabs(x);
  } else {
    return mittens::map<T>([](auto x) { return x < 0 ? decltype(x)(-x) : x; }, x);
  }
}

// Of a number and a NaN the number, as fmin and fmax; of integers the order of their type.
template <typename T>
MITTENS_INLINE constexpr T min(T x, T y) {
  if constexpr (mittens::is_float<T>) {
    return fmin(x, y);
  } else {
    return mittens::map<T>([](auto x, auto y) { return y < x ? y : x; }, x, y);
  }
}
template <typename T>
MITTENS_INLINE constexpr T max(T x, T y) {
  if constexpr (mittens::is_float<T>) {
    return fmax(x, y);
  } else {
    return mittens::map<T>([](auto x, auto y) { return x < y ? y : x; }, x, y);
  }
}
template <typename T>
MITTENS_INLINE constexpr T min3(T x, T y, T z) {
  return min(x, min(y, z));
}
template <typename T>
MITTENS_INLINE constexpr T max3(T x, T y, T z) {
  return max(x, max(y, z));
}
template <typename T>
MITTENS_INLINE constexpr T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}

// A vector against one number for all its elements.
#define MITTENS_WITH_SCALAR(name)                                                               \
  template <typename T, typename = enable_if_t<mittens::Vector<T>::is_vector>>                  \
  MITTENS_INLINE T name(T x, mittens::Element<T> y) {                                           \
    return name(x, T(y));                                                                       \
  }
MITTENS_WITH_SCALAR(min)
MITTENS_WITH_SCALAR(max)
MITTENS_WITH_SCALAR(pow)
#undef MITTENS_WITH_SCALAR
template <typename T, typename = enable_if_t<mittens::Vector<T>::is_vector>>
MITTENS_INLINE T clamp(T x, mittens::Element<T> low, mittens::Element<T> high) {
  return clamp(x, T(low), T(high));
}

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
  return x - floor(x);
}
template <typename T, typename = mittens::FloatOnly<T>>
MITTENS_INLINE T fdim(T x, T y) {
  return mittens::map<T>([](auto x, auto y) { return x > y ? decltype(x)(x - y) : decltype(x)(0); }, x, y);
}
template <typename T, typename = enable_if_t<mittens::is_float<T> && !mittens::Vector<T>::is_vector>>
MITTENS_INLINE T ldexp(T x, int exponent) {
  return T(mittens::math::ldexp(float(x), exponent));
}
template <typename T, typename = enable_if_t<mittens::is_float<T> && !mittens::Vector<T>::is_vector>>
MITTENS_INLINE T modf(T x, T& whole) {
  whole = trunc(x);
  return x - whole;
}

#define MITTENS_TEST(name, test)                                    \
  template <typename T, typename = mittens::FloatOnly<T>>           \
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
MITTENS_TEST(isnormal, __builtin_isnormal(element))
MITTENS_TEST(signbit, __builtin_signbit(element))
#undef MITTENS_TEST

// A truth is a bool, a vector of bool, or what a comparison of vectors gives (integers, all ones where true).
template <typename M>
MITTENS_INLINE constexpr bool any(M mask) {
  if constexpr (mittens::Vector<M>::is_vector) {
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
  if constexpr (mittens::Vector<M>::is_vector) {
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

template <typename V>
MITTENS_INLINE mittens::Element<V> dot(V x, V y) {
  mittens::Element<V> sum = x[0] * y[0];
  for (int i = 1; i < mittens::Vector<V>::size; ++i) {
    sum += x[i] * y[i];
  }
  return sum;
}
template <typename V>
MITTENS_INLINE mittens::Element<V> length_squared(V x) {
  return dot(x, x);
}
template <typename V>
MITTENS_INLINE mittens::Element<V> length(V x) {
  return sqrt(dot(x, x));
}
template <typename V>
MITTENS_INLINE mittens::Element<V> distance(V x, V y) {
  return length(x - y);
}
template <typename V>
MITTENS_INLINE V normalize(V x) {
  return x * rsqrt(dot(x, x));
}
template <typename T>
MITTENS_INLINE vec<T, 3> cross(vec<T, 3> x, vec<T, 3> y) {
  return x.yzx * y.zxy - x.zxy * y.yzx;
}

namespace precise {
using metal::fma;
using metal::fmax;
using metal::fmin;
using metal::max;
using metal::min;
}  // namespace precise
namespace fast {
using metal::abs;
using metal::clamp;
using metal::fabs;
using metal::fma;
using metal::fmax;
using metal::fmin;
using metal::max;
using metal::min;
}  // namespace fast

}  // namespace metal
