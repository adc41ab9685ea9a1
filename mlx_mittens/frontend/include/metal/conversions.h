// Calls that frontend/rewrite/conversions.py writes into a text where Metal converts and clang does not.
#pragma once

namespace mittens {

// A conversion that is written as a cast: of vectors element by element, of half and bfloat, of anything else as it is.
template <typename To, typename From>
MITTENS_INLINE constexpr auto convert(From from) {
  using Result = metal::remove_cv_t<To>;
  if constexpr (Vector<Result>::is_vector || is_packed<From>) {
    return construct<Result>(from);
  } else if constexpr (__is_arithmetic(Result) && __is_arithmetic(From)) {
    return scalar_cast<Result>(from);
  } else {
    return (Result)from;
  }
}
template <typename To, typename... From, typename = metal::enable_if_t<(sizeof...(From) > 1)>>
MITTENS_INLINE constexpr auto convert(From... from) {
  return construct<metal::remove_cv_t<To>>(from...);
}

// b.xy of a vector of truths, whose components clang only has by their index.
template <int... k, typename V>
MITTENS_INLINE auto components(V vector) {
  metal::vec<bool, sizeof...(k)> result;
  int at = 0;
  ((result[at++] = vector[k]), ...);
  return result;
}
template <typename V, int... k>
struct Components {
  V& vector;
  MITTENS_INLINE void operator=(metal::vec<bool, sizeof...(k)> value) {
    int at = 0;
    ((vector[k] = value[at++]), ...);
  }
};
template <int... k, typename V>
MITTENS_INLINE Components<V, k...> components_of(V& vector) {
  return {vector};
}

#ifdef MITTENS_DIALECT
template <typename T>
T function_constant();

// A number as a float next to it that no bfloat holds, so that clang warns where it becomes a bfloat.
template <typename T>
MITTENS_INLINE constexpr auto inexact(T x) {
  if constexpr (__is_arithmetic(T)) {
    return __builtin_bit_cast(float, __builtin_bit_cast(uint, float(x)) | 1u);
  } else {
    return x;
  }
}
#endif

template <typename T>
constexpr bool is_object = __is_class(T) || __is_union(T);

#ifdef __SPIRV__
// There no address space holds all others, so a struct is copied.
template <typename T>
struct Place {
  T* place;
  template <typename V>
  MITTENS_INLINE void operator=(V value) {
    assign(place, &value);
  }
};
template <typename T>
MITTENS_INLINE auto in_thread(T&& x) {
  using Object = __remove_reference_t(T);
  if constexpr (is_object<Object> && __is_lvalue_reference(T)) {
    metal::remove_cv_t<metal::remove_addrspace_t<Object>> copy;
    assign(&copy, &x);
    return copy;
  } else {
    return x;
  }
}
template <typename T>
MITTENS_INLINE decltype(auto) place(T& x) {
  if constexpr (is_object<T>) {
    return Place<T>{&x};
  } else {
    return (x);
  }
}
#else
// An object in any address space as one of the thread's own: the same bytes, in a type that has its own functions.
template <typename T>
MITTENS_INLINE decltype(auto) in_thread(T&& x) {
  using Object = __remove_reference_t(T);
  if constexpr (!__is_lvalue_reference(T)) {
    return Object(static_cast<T&&>(x));
  } else if constexpr (is_object<Object>) {
    return *(metal::remove_addrspace_t<Object>*)&x;
  } else {
    return (x);
  }
}
template <typename T>
MITTENS_INLINE decltype(auto) place(T& x) {
  return in_thread(x);
}
#endif

}  // namespace mittens
