// Type traits and numeric limits.
#pragma once

namespace metal {

template <typename T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  constexpr operator T() const noexcept {
    return v;
  }
};
template <bool v>
using bool_constant = integral_constant<bool, v>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <typename... B>
struct _disjunction : bool_constant<(false || ... || bool(B::value))> {};
template <typename... B>
struct _conjunction : bool_constant<(true && ... && bool(B::value))> {};
template <typename B>
struct _negation : bool_constant<!bool(B::value)> {};
template <typename T, typename U>
struct is_same : bool_constant<__is_same(T, U)> {};
template <bool condition, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  using type = T;
};
template <bool condition, typename T, typename U>
struct conditional {
  using type = T;
};
template <typename T, typename U>
struct conditional<false, T, U> {
  using type = U;
};
template <typename T>
struct remove_reference {
  using type = __remove_reference_t(T);
};
template <typename T>
struct remove_cv {
  using type = __remove_cv(T);
};
template <typename T>
struct remove_const {
  using type = __remove_const(T);
};
template <typename T>
struct remove_volatile {
  using type = __remove_volatile(T);
};
template <typename T>
struct remove_addrspace {
  using type = T;
};
template <typename T>
struct remove_addrspace<MITTENS_DEVICE T> {
  using type = T;
};
template <typename T>
struct remove_addrspace<MITTENS_THREADGROUP T> {
  using type = T;
};
template <typename T>
struct remove_addrspace<MITTENS_DEVICE const T> {
  using type = const T;
};
template <typename T>
struct remove_addrspace<MITTENS_THREADGROUP const T> {
  using type = const T;
};
template <typename T>
struct remove_addrspace<MITTENS_CONSTANT T> {
  using type = T;
};
template <typename T>
struct remove_addrspace<MITTENS_CONSTANT const T> {
  using type = const T;
};
template <typename T>
struct remove_pointer {
  using type = __remove_pointer(T);
};
template <typename T>
struct make_unsigned {
  using type = __make_unsigned(T);
};
template <typename T>
struct make_signed {
  using type = __make_signed(T);
};

template <bool condition, typename T = void>
using enable_if_t = typename enable_if<condition, T>::type;
template <bool condition, typename T, typename U>
using conditional_t = typename conditional<condition, T, U>::type;
template <typename T>
using remove_reference_t = typename remove_reference<T>::type;
template <typename T>
using remove_cv_t = typename remove_cv<T>::type;
template <typename T>
using remove_const_t = typename remove_const<T>::type;
template <typename T>
using remove_volatile_t = typename remove_volatile<T>::type;
template <typename T>
using remove_addrspace_t = typename remove_addrspace<T>::type;
template <typename T>
using remove_pointer_t = typename remove_pointer<T>::type;
template <typename T>
using make_unsigned_t = typename make_unsigned<T>::type;
template <typename T>
using make_signed_t = typename make_signed<T>::type;
template <typename T>
using decay_t = remove_cv_t<remove_addrspace_t<remove_reference_t<T>>>;

template <typename T>
struct is_void : is_same<remove_cv_t<T>, void> {};
template <typename T>
struct is_integral : bool_constant<__is_integral(T)> {};
template <typename T>
struct is_floating_point : bool_constant<__is_floating_point(T)> {};
template <typename T>
struct is_arithmetic : bool_constant<__is_integral(T) || __is_floating_point(T)> {};
template <typename T>
struct is_signed : bool_constant<__is_signed(T)> {};
template <typename T>
struct is_unsigned : bool_constant<__is_unsigned(T)> {};
template <typename T>
struct is_scalar : bool_constant<__is_scalar(T)> {};
template <typename T>
struct is_pointer : bool_constant<__is_pointer(T)> {};
template <typename T>
struct is_reference : bool_constant<__is_reference(T)> {};
template <typename T>
struct is_const : bool_constant<__is_const(T)> {};
template <typename T>
struct is_enum : bool_constant<__is_enum(T)> {};
template <typename T>
struct is_class : bool_constant<__is_class(T)> {};
template <typename T>
struct is_trivially_copyable : bool_constant<__is_trivially_copyable(T)> {};
template <typename T, typename U>
struct is_convertible : bool_constant<__is_convertible(T, U)> {};
// To clang all numbers convert to bfloat; to Metal float and half do not.
template <>
struct is_convertible<float, bfloat> : false_type {};
template <>
struct is_convertible<half, bfloat> : false_type {};
template <typename T, typename... A>
struct is_constructible : bool_constant<__is_constructible(T, A...)> {};
template <typename T, typename U>
struct is_base_of : bool_constant<__is_base_of(T, U)> {};
template <typename T>
struct is_vector : bool_constant<mittens::Vector<T>::is_vector> {};

template <typename T, typename U>
constexpr bool is_same_v = __is_same(T, U);
template <typename T>
constexpr bool is_void_v = is_void<T>::value;
template <typename T>
constexpr bool is_integral_v = is_integral<T>::value;
template <typename T>
constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <typename T>
constexpr bool is_arithmetic_v = is_arithmetic<T>::value;
template <typename T>
constexpr bool is_signed_v = is_signed<T>::value;
template <typename T>
constexpr bool is_unsigned_v = is_unsigned<T>::value;
template <typename T>
constexpr bool is_scalar_v = is_scalar<T>::value;
template <typename T>
constexpr bool is_pointer_v = is_pointer<T>::value;
template <typename T>
constexpr bool is_reference_v = is_reference<T>::value;
template <typename T>
constexpr bool is_const_v = is_const<T>::value;
template <typename T>
constexpr bool is_enum_v = is_enum<T>::value;
template <typename T>
constexpr bool is_class_v = is_class<T>::value;
template <typename T, typename U>
constexpr bool is_convertible_v = is_convertible<T, U>::value;
template <typename T, typename... A>
constexpr bool is_constructible_v = is_constructible<T, A...>::value;
template <typename T, typename U>
constexpr bool is_base_of_v = is_base_of<T, U>::value;
template <typename T>
constexpr bool is_vector_v = is_vector<T>::value;

template <typename T>
remove_reference_t<T>&& declval();
template <typename T>
MITTENS_INLINE constexpr T&& forward(remove_reference_t<T>& x) {
  return static_cast<T&&>(x);
}
template <typename T>
MITTENS_INLINE constexpr remove_reference_t<T>&& move(T&& x) {
  return static_cast<remove_reference_t<T>&&>(x);
}
template <typename T>
MITTENS_INLINE constexpr void swap(T& a, T& b) {
  const T old = a;
  a = b;
  b = old;
}

// A value that is the same in every thread: no more than the value, here.
template <typename T>
struct uniform {
  T value;
  uniform() = default;
  constexpr uniform(T value) : value(value) {}
  constexpr operator T() const {
    return value;
  }
};
template <typename T>
MITTENS_INLINE constexpr uniform<T> make_uniform(T value) {
  return uniform<T>(value);
}

template <typename T, T... values>
struct integer_sequence {
  using value_type = T;
  static constexpr size_t size() {
    return sizeof...(values);
  }
};
template <typename T, T count>
using make_integer_sequence = __make_integer_seq<integer_sequence, T, count>;
template <size_t... values>
using index_sequence = integer_sequence<size_t, values...>;
template <size_t count>
using make_index_sequence = make_integer_sequence<size_t, count>;
template <typename... T>
using index_sequence_for = make_index_sequence<sizeof...(T)>;

template <typename T, size_t N>
struct array {
  T elements[N];
  MITTENS_INLINE constexpr T& operator[](size_t i) {
    return elements[i];
  }
  MITTENS_INLINE constexpr const T& operator[](size_t i) const {
    return elements[i];
  }
  MITTENS_INLINE constexpr size_t size() const {
    return N;
  }
  MITTENS_INLINE constexpr T* data() {
    return elements;
  }
  MITTENS_INLINE constexpr const T* data() const {
    return elements;
  }
  MITTENS_INLINE constexpr T* begin() {
    return elements;
  }
  MITTENS_INLINE constexpr const T* begin() const {
    return elements;
  }
  MITTENS_INLINE constexpr T* end() {
    return elements + N;
  }
  MITTENS_INLINE constexpr const T* end() const {
    return elements + N;
  }
};

template <typename T>
struct vec_elements : integral_constant<ushort, mittens::Vector<T>::size> {};
template <typename T>
constexpr ushort vec_elements_v = vec_elements<T>::value;

// The base of the limits in Metal's own headers; texts of MLX's specialize them for types of their own.
struct _fp_numeric_limits_impl_base {
  static constexpr bool is_specialized = true;
  static constexpr bool is_signed = true;
  static constexpr bool is_integer = false;
  static constexpr bool has_infinity = true;
  static constexpr bool has_quiet_NaN = true;
};
struct _integer_numeric_limits_impl_base {
  static constexpr bool is_specialized = true;
  static constexpr bool is_integer = true;
};
template <typename T>
struct _numeric_limits_impl {};

template <typename T>
struct numeric_limits {
  static_assert(__is_integral(T), "numeric_limits of a type that has none");
  static constexpr bool is_specialized = true;
  static constexpr bool is_signed = T(-1) < T(0);
  static constexpr bool is_integer = true;
  static constexpr int digits = int(sizeof(T)) * 8 - (is_signed ? 1 : 0);
  static constexpr T max() {
    if constexpr (__is_same(T, bool)) {
      return true;
    } else if constexpr (is_signed) {
      return T(~0ull >> (64 - digits));
    } else {
      return T(~T(0));
    }
  }
  static constexpr T min() {
    return is_signed ? T(-max() - 1) : T(0);
  }
  static constexpr T lowest() {
    return min();
  }
  static constexpr T infinity() {
    return T(0);
  }
};
template <typename T>
struct numeric_limits<const T> : numeric_limits<T> {};

// To the check a float is one that no bfloat holds, so that clang warns where it becomes a bfloat.
#ifdef MITTENS_DIALECT
#define MITTENS_NO_BFLOAT(type, value) (__is_same(type, float) ? __FLT_MAX__ : value)
#else
#define MITTENS_NO_BFLOAT(type, value) value
#endif
#define MITTENS_LIMITS(type, largest, smallest, step, denormal, bits)     \
  template <>                                                             \
  struct numeric_limits<type> {                                           \
    static constexpr bool is_specialized = true;                          \
    static constexpr bool is_signed = true;                               \
    static constexpr bool is_integer = false;                             \
    static constexpr bool has_infinity = true;                            \
    static constexpr bool has_quiet_NaN = true;                           \
    static constexpr int digits = bits;                                   \
    static constexpr type max() {                                         \
      return type(largest);                                               \
    }                                                                     \
    static constexpr type min() {                                         \
      return type(smallest);                                              \
    }                                                                     \
    static constexpr type lowest() {                                      \
      return type(-largest);                                              \
    }                                                                     \
    static constexpr type epsilon() {                                     \
      return type(step);                                                  \
    }                                                                     \
    static constexpr type denorm_min() {                                  \
      return type(denormal);                                              \
    }                                                                     \
    static constexpr type infinity() {                                    \
      return type(MITTENS_NO_BFLOAT(type, __builtin_inff()));             \
    }                                                                     \
    static constexpr type quiet_NaN() {                                   \
      return type(MITTENS_NO_BFLOAT(type, __builtin_nanf("")));           \
    }                                                                     \
    static constexpr type signaling_NaN() {                               \
      return type(__builtin_nanf(""));                                    \
    }                                                                     \
  };
MITTENS_LIMITS(float, __FLT_MAX__, __FLT_MIN__, __FLT_EPSILON__, __FLT_DENORM_MIN__, 24)
MITTENS_LIMITS(half, 65504.0f, 0x1p-14f, 0x1p-10f, 0x1p-24f, 11)
MITTENS_LIMITS(bfloat, 0x1.fep127f, 0x1p-126f, 0x1p-7f, 0x1p-133f, 8)
#undef MITTENS_LIMITS
#undef MITTENS_NO_BFLOAT

}  // namespace metal
