// The arguments of Metal's mathematics: which types a function takes, and which one it computes in where they differ.
#pragma once

namespace mittens {

template <typename T>
constexpr bool is_bfloat = __is_same(Element<T>, bfloat);
template <typename T>
constexpr bool is_float = __is_same(Element<T>, float) || __is_same(Element<T>, half) || is_bfloat<T>;

// Metal's own mathematics have no form for bfloat, which converts to float; MLX's headers bring such forms.
#ifdef MITTENS_DIALECT
template <typename T>
constexpr bool has_math = !is_bfloat<T>;
#else
template <typename T>
constexpr bool has_math = true;
#endif
template <typename T>
using FloatOnly = metal::enable_if_t<is_float<T> && has_math<T>>;

// The number or vector that an object with a conversion function, or a packed vector, is as an argument: overload
// resolution among Metal's types chooses it.
template <typename T>
constexpr bool is_class = __is_class(T) || __is_union(T);
#define MITTENS_ARGUMENT(type)                                     \
  type argument(type);                                             \
  metal::vec<type, 2> argument(metal::vec<type, 2>);               \
  metal::vec<type, 3> argument(metal::vec<type, 3>);               \
  metal::vec<type, 4> argument(metal::vec<type, 4>);
MITTENS_ARGUMENT(bool)
MITTENS_ARGUMENT(char)
MITTENS_ARGUMENT(uchar)
MITTENS_ARGUMENT(short)
MITTENS_ARGUMENT(ushort)
MITTENS_ARGUMENT(int)
MITTENS_ARGUMENT(uint)
MITTENS_ARGUMENT(long)
MITTENS_ARGUMENT(ulong)
MITTENS_ARGUMENT(half)
MITTENS_ARGUMENT(bfloat)
MITTENS_ARGUMENT(float)
#undef MITTENS_ARGUMENT
template <typename T>
struct Plain {
  using type = T;
};
template <typename T>
  requires is_class<T> && requires(T x) { argument(x); }
struct Plain<T> {
  using type = decltype(argument(metal::declval<T>()));
};
template <typename T>
using plain_t = typename Plain<T>::type;
// Enables a function for numbers and vectors, but not for objects.
template <typename T>
using NoObject = metal::enable_if_t<has_math<T> && !is_class<T>>;
template <typename T>
using FloatVector = metal::enable_if_t<is_float<T> && has_math<T> && Vector<T>::is_vector>;

// The type in which a floating-point function computes arguments of several types: a vector, to which numbers are
// broadcast, or the one of float and half that occurs; float for bfloat. Void where Metal finds none.
template <typename... A>
struct Mixed {
  static constexpr int floats = (0 + ... + int(__is_same(A, float)));
  static constexpr int halfs = (0 + ... + int(__is_same(A, half)));
  static constexpr int bfloats = (0 + ... + int(__is_same(A, bfloat)));
  static constexpr int numbers = (0 + ... + int(__is_arithmetic(A)));
  template <bool all_kinds>
  using scalar = metal::conditional_t<
      (all_kinds || floats + bfloats == int(sizeof...(A))) && halfs == 0 && floats + bfloats != 0, float,
      metal::conditional_t<all_kinds && halfs != 0 && floats + bfloats == 0, half, void>>;
};
template <typename... A>
struct Widest {
  using type = void;
};
template <typename A, typename... Rest>
struct Widest<A, Rest...> {
  using type = metal::conditional_t<Vector<A>::is_vector, A, typename Widest<Rest...>::type>;
};
template <bool all_kinds, typename... A>
struct MixedType {
  using Wide = typename Widest<A...>::type;
  static constexpr bool fits = has_math<Wide> && (true && ... && (__is_same(A, Wide) || (__is_arithmetic(A))));
  using Number = metal::conditional_t<Mixed<A...>::numbers == int(sizeof...(A)),
                                      typename Mixed<A...>::template scalar<all_kinds>, void>;
  using type = metal::conditional_t<__is_same(Wide, void), Number, metal::conditional_t<fits, Wide, void>>;
};
template <typename... A>
struct AllSame {
  static constexpr bool value = false;
};
template <typename A, typename... Rest>
struct AllSame<A, Rest...> {
  static constexpr bool value = (true && ... && __is_same(A, Rest)) && (!is_bfloat<A> || has_math<A>);
};
template <bool all_kinds, typename... A>
struct CommonType : MixedType<all_kinds, A...> {};
template <bool all_kinds, typename A, typename... Rest>
  requires AllSame<A, Rest...>::value
struct CommonType<all_kinds, A, Rest...> {
  using type = metal::conditional_t<is_class<A>, void, A>;
};
// Only where the arguments differ (or are objects, or of bfloat without forms for it), and one type serves them all.
template <typename M, typename... A>
using only_mixed_t = metal::enable_if_t<(is_class<A> || ... || !AllSame<A...>::value) && !__is_same(M, void), M>;
template <bool all_kinds, typename... A>
using mixed_t = only_mixed_t<typename CommonType<all_kinds, plain_t<A>...>::type, A...>;
// The common type of arguments where at least one is an object.
template <typename... A>
using object_t = metal::enable_if_t<(false || ... || is_class<A>) && AllSame<plain_t<A>...>::value,
                                    typename CommonType<false, plain_t<A>...>::type>;

template <typename T>
using Truth = metal::conditional_t<Vector<T>::is_vector, bool __attribute__((ext_vector_type(Vector<T>::size))), bool>;

}  // namespace mittens

// Forms of functions of namespace metal: math.h and geometry.h use them, and math.h takes them back.

// The same functions where arguments differ in type.
#define MITTENS_MIXED1(name)                                                                        \
  template <typename T, typename M = mittens::mixed_t<true, T>>                                     \
  MITTENS_INLINE M name(T x) {                                                                      \
    return name(mittens::construct<M>(x));                                                                              \
  }
#define MITTENS_MIXED2(name, all_kinds)                                                             \
  template <typename A, typename B, typename M = mittens::mixed_t<all_kinds, A, B>>                 \
  MITTENS_INLINE constexpr M name(A x, B y) {                                                       \
    return name(mittens::construct<M>(x), mittens::construct<M>(y));                                                                        \
  }
#define MITTENS_MIXED3(name, all_kinds)                                                             \
  template <typename A, typename B, typename C, typename M = mittens::mixed_t<all_kinds, A, B, C>>  \
  MITTENS_INLINE constexpr M name(A x, B y, C z) {                                                  \
    return name(mittens::construct<M>(x), mittens::construct<M>(y), mittens::construct<M>(z));                                                                  \
  }

// The other functions, of objects.
#define MITTENS_OBJECTS(name)                                                                       \
  template <typename... A, typename M = mittens::object_t<A...>>                                    \
  MITTENS_INLINE constexpr auto name(A... a) {                                                      \
    return name(mittens::construct<M>(a)...);                                                       \
  }
