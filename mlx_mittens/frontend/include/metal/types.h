// Address spaces, scalars and vectors.
#pragma once

// To the generators of code, 1 is device memory (NVIDIA's global) and 3 threadgroup memory (its shared). `constant` is
// a generic pointer to them, since it may be anywhere, and yet a type of its own to the compiler.
#define MITTENS_DEVICE __attribute__((address_space(1)))
#define MITTENS_THREADGROUP __attribute__((address_space(3)))
#if defined(__SPIRV__) || defined(MITTENS_DIALECT)
// There 0 is a thread's own memory. C++ does not copy objects in SPIR-V's constant memory, 2, so spirv_module.py
// replaces this space by 2 later. The check uses it to find casts to or from constant memory.
#define MITTENS_CONSTANT __attribute__((address_space(4)))
#else
#define MITTENS_CONSTANT __attribute__((address_space(0)))
#endif
// Without debug information, so that inlined code counts as the kernel's line that called it.
#define MITTENS_INLINE inline __attribute__((always_inline, nodebug))

using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long;
using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using size_t = unsigned long;
using ptrdiff_t = long;
using intptr_t = long;
using uintptr_t = unsigned long;
using half = _Float16;
using bfloat = __bf16;

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

}  // namespace metal

#define MITTENS_VECTORS(type)                               \
  using type##2 = type __attribute__((ext_vector_type(2))); \
  using type##3 = type __attribute__((ext_vector_type(3))); \
  using type##4 = type __attribute__((ext_vector_type(4)));
MITTENS_VECTORS(bool)
MITTENS_VECTORS(char)
MITTENS_VECTORS(uchar)
MITTENS_VECTORS(short)
MITTENS_VECTORS(ushort)
MITTENS_VECTORS(int)
MITTENS_VECTORS(uint)
MITTENS_VECTORS(long)
MITTENS_VECTORS(ulong)
MITTENS_VECTORS(half)
MITTENS_VECTORS(bfloat)
MITTENS_VECTORS(float)
#undef MITTENS_VECTORS

// Packed vectors are aligned as their elements. One of three elements is a struct, since clang's takes four.
#define MITTENS_PACKED(type)                                                                           \
  typedef type##2 packed_##type##2 __attribute__((aligned(__alignof__(type))));                        \
  typedef type##4 packed_##type##4 __attribute__((aligned(__alignof__(type))));                        \
  struct packed_##type##3 {                                                                            \
    union {                                                                                            \
      struct {                                                                                         \
        type x, y, z;                                                                                  \
      };                                                                                               \
      struct {                                                                                         \
        type r, g, b;                                                                                  \
      };                                                                                               \
      type element[3];                                                                                 \
    };                                                                                                 \
    packed_##type##3() = default;                                                                      \
    MITTENS_INLINE constexpr packed_##type##3(type x, type y, type z) : x(x), y(y), z(z) {}            \
    MITTENS_INLINE constexpr packed_##type##3(type##3 v) : x(v[0]), y(v[1]), z(v[2]) {}                \
    MITTENS_INLINE explicit constexpr packed_##type##3(type v) : x(v), y(v), z(v) {}                   \
    MITTENS_INLINE constexpr operator type##3() const {                                                \
      return type##3{x, y, z};                                                                         \
    }                                                                                                  \
    MITTENS_INLINE type& operator[](int i) {                                                           \
      return element[i];                                                                               \
    }                                                                                                  \
    MITTENS_INLINE const type& operator[](int i) const {                                               \
      return element[i];                                                                               \
    }                                                                                                  \
  };                                                                                                   \
  MITTENS_PACKED_OPERATOR(type, +)                                                                     \
  MITTENS_PACKED_OPERATOR(type, -)                                                                     \
  MITTENS_PACKED_OPERATOR(type, *)                                                                     \
  MITTENS_PACKED_OPERATOR(type, /)
#define MITTENS_PACKED_OPERATOR(type, symbol)                                                          \
  MITTENS_INLINE type##3 operator symbol(packed_##type##3 a, packed_##type##3 b) {                     \
    return type##3(a) symbol type##3(b);                                                               \
  }                                                                                                    \
  MITTENS_INLINE type##3 operator symbol(packed_##type##3 a, type##3 b) {                              \
    return type##3(a) symbol b;                                                                        \
  }                                                                                                    \
  MITTENS_INLINE type##3 operator symbol(type##3 a, packed_##type##3 b) {                              \
    return a symbol type##3(b);                                                                        \
  }                                                                                                    \
  MITTENS_INLINE type##3 operator symbol(packed_##type##3 a, type b) {                                 \
    return type##3(a) symbol b;                                                                        \
  }                                                                                                    \
  MITTENS_INLINE type##3 operator symbol(type a, packed_##type##3 b) {                                 \
    return a symbol type##3(b);                                                                        \
  }                                                                                                    \
  MITTENS_INLINE packed_##type##3& operator symbol##=(packed_##type##3& a, type##3 b) {                \
    return a = type##3(a) symbol b;                                                                    \
  }                                                                                                    \
  MITTENS_INLINE packed_##type##3& operator symbol##=(packed_##type##3& a, type b) {                   \
    return a = type##3(a) symbol b;                                                                    \
  }
MITTENS_PACKED(char)
MITTENS_PACKED(uchar)
MITTENS_PACKED(short)
MITTENS_PACKED(ushort)
MITTENS_PACKED(int)
MITTENS_PACKED(uint)
MITTENS_PACKED(long)
MITTENS_PACKED(ulong)
MITTENS_PACKED(half)
MITTENS_PACKED(bfloat)
MITTENS_PACKED(float)
#undef MITTENS_PACKED
#undef MITTENS_PACKED_OPERATOR

namespace mittens {

// The element type and the size of a vector; a scalar is its own element, once.
template <typename T>
struct Vector {
  using Element = T;
  static constexpr int size = 1;
  static constexpr bool is_vector = false;
};
template <typename T, int N>
struct Vector<T __attribute__((ext_vector_type(N)))> {
  using Element = T;
  static constexpr int size = N;
  static constexpr bool is_vector = true;
};
template <typename T>
struct Vector<const T> : Vector<T> {};
template <typename T>
using Element = typename Vector<T>::Element;

// A packed vector of three as a vector, anything else as it is.
template <typename T>
struct IsPacked {
  static constexpr bool value = false;
};
template <typename T>
constexpr bool is_packed = IsPacked<T>::value;
template <typename T>
MITTENS_INLINE constexpr T unpacked(T x) {
  return x;
}
#define MITTENS_UNPACKED(type)                                           \
  template <>                                                            \
  struct IsPacked<packed_##type##3> {                                    \
    static constexpr bool value = true;                                  \
  };                                                                     \
  MITTENS_INLINE constexpr type##3 unpacked(packed_##type##3 x) {        \
    return x;                                                            \
  }
MITTENS_UNPACKED(char)
MITTENS_UNPACKED(uchar)
MITTENS_UNPACKED(short)
MITTENS_UNPACKED(ushort)
MITTENS_UNPACKED(int)
MITTENS_UNPACKED(uint)
MITTENS_UNPACKED(long)
MITTENS_UNPACKED(ulong)
MITTENS_UNPACKED(half)
MITTENS_UNPACKED(bfloat)
MITTENS_UNPACKED(float)
#undef MITTENS_UNPACKED

// half and bfloat, which clang does not convert to one another, go by way of float.
template <typename To, typename From>
MITTENS_INLINE constexpr To scalar_cast(From x) {
  if constexpr ((__is_same(From, half) && __is_same(To, bfloat)) || (__is_same(From, bfloat) && __is_same(To, half))) {
    return static_cast<To>(static_cast<float>(x));
  } else {
    return static_cast<To>(x);
  }
}

// Elements one by one are not for constant expressions: clang's evaluator does not survive them.
template <typename V, typename A>
MITTENS_INLINE void append(V& vector, int& at, A part) {
  if constexpr (Vector<A>::is_vector) {
    for (int i = 0; i < Vector<A>::size; ++i) {
      vector[at++] = scalar_cast<Element<V>>(Element<A>(part[i]));
    }
  } else {
    vector[at++] = scalar_cast<Element<V>>(part);
  }
}
template <typename V, typename... A>
MITTENS_INLINE V concatenate(A... parts) {
  V vector;
  int at = 0;
  (append(vector, at, parts), ...);
  return vector;
}

template <typename V, typename A>
MITTENS_INLINE constexpr V convert_elements(A vector) {
  if constexpr (sizeof(Element<A>) == 2 && sizeof(Element<V>) == 2 && !__is_same(Element<A>, Element<V>) &&
                __is_floating_point(Element<A>) && __is_floating_point(Element<V>)) {
    using Float = float __attribute__((ext_vector_type(Vector<V>::size)));
    return __builtin_convertvector(__builtin_convertvector(vector, Float), V);
  } else {
    return __builtin_convertvector(vector, V);
  }
}

// Whether an object becomes a vector by a function of its own: `operator float2()`.
template <typename V, typename A>
constexpr bool becomes_vector = (__is_class(A) || __is_union(A)) && Vector<V>::is_vector && requires(A a) {
  static_cast<V>(a);
};

// Metal's constructors, which clang's vectors lack: float4(x), float4(half4), float4(a, b, c, d), float4(xy, z, w).
template <typename V, typename... A>
MITTENS_INLINE constexpr V construct(A... a) {
  if constexpr ((false || ... || is_packed<A>)) {
    return construct<V>(unpacked(a)...);
  } else if constexpr (sizeof...(A) == 1 && (false || ... || becomes_vector<V, A>)) {
    return (static_cast<V>(a), ...);
  } else if constexpr (sizeof...(A) == 0) {
    return V(Element<V>(0));
  } else if constexpr (sizeof...(A) > 1) {
    static_assert((0 + ... + Vector<A>::size) == Vector<V>::size, "a vector is made from too few or too many elements");
#ifdef MITTENS_DIALECT
    static_assert((true && ... && (!Vector<A>::is_vector || __is_same(Element<A>, Element<V>))),
                  "a vector is made from parts of its own type: convert the part, as in float3(v)");
#endif
    if constexpr ((false || ... || Vector<A>::is_vector)) {
      return concatenate<V>(a...);
    } else {
      return V{scalar_cast<Element<V>>(a)...};
    }
  } else if constexpr ((false || ... || Vector<A>::is_vector)) {
    static_assert((0 + ... + Vector<A>::size) == Vector<V>::size, "a vector is made from one of another size");
    return (convert_elements<V>(a), ...);
  } else {
    return (V(scalar_cast<Element<V>>(a)), ...);
  }
}

template <typename V, typename F, typename... A>
MITTENS_INLINE V map_elements(F f, A... a) {
  V result;
  for (int i = 0; i < Vector<V>::size; ++i) {
    result[i] = f(Element<A>(a[i])...);
  }
  return result;
}
// f of the elements of vectors, or of scalars.
template <typename V, typename F, typename... A>
MITTENS_INLINE constexpr V map(F f, A... a) {
  if constexpr (Vector<V>::is_vector) {
    return map_elements<V>(f, a...);
  } else {
    return f(a...);
  }
}

}  // namespace mittens

template <typename To, typename From>
MITTENS_INLINE constexpr To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type changes the size");
  return __builtin_bit_cast(To, from);
}

namespace metal {
using ::as_type;
}
