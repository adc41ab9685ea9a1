// Operations of a simdgroup, of a quad, and barriers. Each target brings shuffle, reduce, prefix, ballot and barrier.
#pragma once

namespace mittens {

struct Sum {
  static constexpr bool has_redux = true;
  template <typename T>
  MITTENS_INLINE static T apply(T a, T b) {
    return a + b;
  }
#ifdef __NVPTX__
  MITTENS_INLINE static int redux(int value) {
    return __nvvm_redux_sync_add(value, all_lanes);
  }
#endif
};
struct Product {
  static constexpr bool has_redux = false;
  template <typename T>
  MITTENS_INLINE static T apply(T a, T b) {
    return a * b;
  }
#ifdef __NVPTX__
  MITTENS_INLINE static int redux(int value) {
    return value;
  }
#endif
};
struct Minimum {
  static constexpr bool has_redux = true;
  template <typename T>
  MITTENS_INLINE static T apply(T a, T b) {
    return metal::min(a, b);
  }
#ifdef __NVPTX__
  MITTENS_INLINE static int redux(int value) {
    return __nvvm_redux_sync_min(value, all_lanes);
  }
  MITTENS_INLINE static uint redux(uint value) {
    return __nvvm_redux_sync_umin(value, all_lanes);
  }
#endif
};
struct Maximum {
  static constexpr bool has_redux = true;
  template <typename T>
  MITTENS_INLINE static T apply(T a, T b) {
    return metal::max(a, b);
  }
#ifdef __NVPTX__
  MITTENS_INLINE static int redux(int value) {
    return __nvvm_redux_sync_max(value, all_lanes);
  }
  MITTENS_INLINE static uint redux(uint value) {
    return __nvvm_redux_sync_umax(value, all_lanes);
  }
#endif
};
struct And {
  static constexpr bool has_redux = true;
  template <typename T>
  MITTENS_INLINE static T apply(T a, T b) {
    return a & b;
  }
#ifdef __NVPTX__
  MITTENS_INLINE static int redux(int value) {
    return __nvvm_redux_sync_and(value, all_lanes);
  }
#endif
};
struct Or {
  static constexpr bool has_redux = true;
  template <typename T>
  MITTENS_INLINE static T apply(T a, T b) {
    return a | b;
  }
#ifdef __NVPTX__
  MITTENS_INLINE static int redux(int value) {
    return __nvvm_redux_sync_or(value, all_lanes);
  }
#endif
};
struct Xor {
  static constexpr bool has_redux = true;
  template <typename T>
  MITTENS_INLINE static T apply(T a, T b) {
    return a ^ b;
  }
#ifdef __NVPTX__
  MITTENS_INLINE static int redux(int value) {
    return __nvvm_redux_sync_xor(value, all_lanes);
  }
#endif
};

}  // namespace mittens

namespace metal {

enum class mem_flags : unsigned {
  mem_none = mittens::no_memory,
  mem_device = mittens::device_memory,
  mem_threadgroup = mittens::threadgroup_memory,
  mem_device_and_threadgroup = mittens::device_memory | mittens::threadgroup_memory,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(unsigned(a) | unsigned(b));
}

MITTENS_INLINE void threadgroup_barrier(mem_flags flags, mittens::Site site = mittens::here()) {
  mittens::barrier(mittens::threadgroup_scope, "threadgroup_barrier", site, unsigned(flags));
}
MITTENS_INLINE void simdgroup_barrier(mem_flags flags, mittens::Site site = mittens::here()) {
  mittens::barrier(mittens::simdgroup_scope, "simdgroup_barrier", site, unsigned(flags));
}

}  // namespace metal

namespace mittens {

// A bit for each of `width` lanes: whether it answered yes.
template <unsigned width>
class Vote {
 public:
  using vote_t = ulong;
  Vote() = default;
  explicit constexpr Vote(vote_t vote) : vote_(vote) {}
  explicit constexpr operator vote_t() const {
    return vote_;
  }
  bool all() const {
    return vote_ == (vote_t(1) << width) - 1;
  }
  bool any() const {
    return vote_ != 0;
  }

 private:
  vote_t vote_ = 0;
};

}  // namespace mittens

namespace metal {

using simd_vote = mittens::Vote<32>;
using quad_vote = mittens::Vote<4>;

// The types that they take, of Metal's own functions; MLX's headers bring some for others.
#ifdef MITTENS_DIALECT
template <typename T>
constexpr bool is_any_of() {
  return false;
}
template <typename T, typename First, typename... Rest>
constexpr bool is_any_of() {
  if constexpr (sizeof...(Rest) == 0) {
    return __is_same(T, First);
  } else {
    return __is_same(T, First) || is_any_of<T, Rest...>();
  }
}
template <typename T>
constexpr bool is_lane_integer = is_any_of<mittens::Element<T>, char, signed char, uchar, short, ushort, int, uint>();
template <typename T>
constexpr bool is_lane_number = is_lane_integer<T> || is_any_of<mittens::Element<T>, half, float>();
template <typename T>
constexpr bool is_lane_bfloat = __is_same(mittens::Element<T>, bfloat);
#define MITTENS_SIMD_TYPE(T)                                                                                       \
  __attribute__((diagnose_if(metal::is_lane_bfloat<T>, "SIMD-group functions take no bfloat: pass its bits, by "   \
                                                       "as_type<ushort>, or a float", "error")))                   \
  __attribute__((diagnose_if(__is_same(mittens::Element<T>, bool),                                                 \
                             "SIMD-group functions take no bool: pass ushort(x), or call simd_any, simd_all or "   \
                             "simd_ballot", "error")))                                                             \
  __attribute__((diagnose_if(sizeof(mittens::Element<T>) == 8 && __is_integral(mittens::Element<T>),               \
                             "SIMD-group functions take no integer of 64 bits: pass as_type<uint2>(x)", "error"))) \
  __attribute__((diagnose_if(__is_class(T) || __is_pointer(T),                                                     \
                             "SIMD-group functions take numbers and vectors: pass the members one by one", "error")))
#define MITTENS_SIMD_BITS(T)                                                                                 \
  __attribute__((diagnose_if(!metal::is_lane_integer<T>, "this SIMD-group function takes integers of 8, 16 " \
                                                         "or 32 bits: pass the number's bits, by as_type",   \
                             "error")))
#else
#define MITTENS_SIMD_TYPE(T)
#define MITTENS_SIMD_BITS(T)
#endif

#define MITTENS_LANE_OPERATIONS(group, scope, width)                                                                \
  template <typename T> MITTENS_SIMD_TYPE(T)                                                                        \
  MITTENS_INLINE T group##_shuffle(T data, ushort lane, mittens::Site site = mittens::here()) {                     \
    return mittens::shuffle(scope, #group "_shuffle", site, data, lane);                                            \
  }                                                                                                                 \
  template <typename T> MITTENS_SIMD_TYPE(T)                                                                        \
  MITTENS_INLINE T group##_broadcast(T data, ushort lane, mittens::Site site = mittens::here()) {                   \
    return mittens::shuffle(scope, #group "_broadcast", site, data, lane);                                          \
  }                                                                                                                 \
  template <typename T> MITTENS_SIMD_TYPE(T)                                                                        \
  MITTENS_INLINE T group##_broadcast_first(T data, mittens::Site site = mittens::here()) {                          \
    return mittens::broadcast_first(scope, #group "_broadcast_first", site, data);                                  \
  }                                                                                                                 \
  template <typename T> MITTENS_SIMD_TYPE(T)                                                                        \
  MITTENS_INLINE T group##_shuffle_xor(T data, ushort mask, mittens::Site site = mittens::here()) {                 \
    return mittens::shuffle_xor(scope, #group "_shuffle_xor", site, data, mask);                                    \
  }                                                                                                                 \
  template <typename T> MITTENS_SIMD_TYPE(T)                                                                        \
  MITTENS_INLINE T group##_shuffle_up(T data, ushort delta, mittens::Site site = mittens::here()) {                 \
    const uint lane = mittens::lane() % width;                                                                      \
    return mittens::shuffle(scope, #group "_shuffle_up", site, data, lane >= delta ? lane - delta : lane);          \
  }                                                                                                                 \
  template <typename T> MITTENS_SIMD_TYPE(T)                                                                        \
  MITTENS_INLINE T group##_shuffle_down(T data, ushort delta, mittens::Site site = mittens::here()) {               \
    const uint lane = mittens::lane() % width;                                                                      \
    return mittens::shuffle(scope, #group "_shuffle_down", site, data, lane + delta < width ? lane + delta : lane); \
  }                                                                                                                 \
  template <typename T> MITTENS_SIMD_TYPE(T)                                                                        \
  MITTENS_INLINE T group##_shuffle_rotate_up(T data, ushort delta, mittens::Site site = mittens::here()) {          \
    return mittens::shuffle(scope, #group "_shuffle_rotate_up", site, data, (mittens::lane() - delta) % width);     \
  }                                                                                                                 \
  template <typename T> MITTENS_SIMD_TYPE(T)                                                                        \
  MITTENS_INLINE T group##_shuffle_rotate_down(T data, ushort delta, mittens::Site site = mittens::here()) {        \
    return mittens::shuffle(scope, #group "_shuffle_rotate_down", site, data, (mittens::lane() + delta) % width);   \
  }                                                                                                                 \
  template <typename T> MITTENS_SIMD_TYPE(T)                                                                        \
  MITTENS_INLINE T group##_shuffle_and_fill_up(T data, T filling, ushort delta, ushort modulo = width,              \
                                               mittens::Site site = mittens::here()) {                              \
    const uint lane = mittens::lane() % width;                                                                      \
    const uint start = lane - lane % modulo;                                                                        \
    const uint at = lane - start;                                                                                   \
    const T moved = mittens::shuffle(scope, #group "_shuffle_and_fill_up", site, data, lane - delta);               \
    const T filled = mittens::shuffle(scope, #group "_shuffle_and_fill_up", site, filling,                          \
                                      start + (at + modulo - delta) % modulo);                                      \
    return at >= delta ? moved : filled;                                                                            \
  }                                                                                                                 \
  template <typename T> MITTENS_SIMD_TYPE(T)                                                                        \
  MITTENS_INLINE T group##_shuffle_and_fill_down(T data, T filling, ushort delta, ushort modulo = width,            \
                                                 mittens::Site site = mittens::here()) {                            \
    const uint lane = mittens::lane() % width;                                                                      \
    const uint start = lane - lane % modulo;                                                                        \
    const uint at = lane - start;                                                                                   \
    const T moved = mittens::shuffle(scope, #group "_shuffle_and_fill_down", site, data, lane + delta);             \
    const T filled = mittens::shuffle(scope, #group "_shuffle_and_fill_down", site, filling,                        \
                                      start + (at + delta) % modulo);                                               \
    return at + delta < modulo ? moved : filled;                                                                    \
  }                                                                                                                 \
  MITTENS_REDUCTION(group, scope, sum, Sum)                                                                         \
  MITTENS_REDUCTION(group, scope, product, Product)                                                                 \
  MITTENS_REDUCTION(group, scope, min, Minimum)                                                                     \
  MITTENS_REDUCTION(group, scope, max, Maximum)                                                                     \
  MITTENS_REDUCTION_OF_BITS(group, scope, and, And)                                                                 \
  MITTENS_REDUCTION_OF_BITS(group, scope, or, Or)                                                                   \
  MITTENS_REDUCTION_OF_BITS(group, scope, xor, Xor)                                                                 \
  MITTENS_PREFIX(group, scope, sum, Sum, 0)                                                                         \
  MITTENS_PREFIX(group, scope, product, Product, 1)                                                                 \
  MITTENS_INLINE group##_vote group##_ballot(bool value, mittens::Site site = mittens::here()) {                    \
    return group##_vote(mittens::ballot(scope, #group "_ballot", site, value));                                     \
  }                                                                                                                 \
  MITTENS_INLINE group##_vote group##_active_threads_mask(mittens::Site site = mittens::here()) {                   \
    return group##_vote(mittens::ballot(scope, #group "_active_threads_mask", site, true));                         \
  }                                                                                                                 \
  MITTENS_INLINE bool group##_any(bool value, mittens::Site site = mittens::here()) {                               \
    return mittens::any(scope, #group "_any", site, value);                                                         \
  }                                                                                                                 \
  MITTENS_INLINE bool group##_all(bool value, mittens::Site site = mittens::here()) {                               \
    return !mittens::any(scope, #group "_all", site, !value);                                                       \
  }                                                                                                                 \
  MITTENS_INLINE bool group##_is_first(mittens::Site site = mittens::here()) {                                      \
    const unsigned active = mittens::ballot(scope, #group "_is_first", site, true);                                 \
    return mittens::lane() % width == unsigned(__builtin_ctz(active));                                              \
  }
#define MITTENS_REDUCTION_OF_BITS(group, scope, name, F)                          \
  template <typename T> MITTENS_SIMD_BITS(T)                                      \
  MITTENS_INLINE T group##_##name(T data, mittens::Site site = mittens::here()) { \
    return mittens::reduce<mittens::F>(scope, #group "_" #name, site, data);      \
  }
#define MITTENS_REDUCTION(group, scope, name, F)                                  \
  template <typename T> MITTENS_SIMD_TYPE(T)                                      \
  MITTENS_INLINE T group##_##name(T data, mittens::Site site = mittens::here()) { \
    return mittens::reduce<mittens::F>(scope, #group "_" #name, site, data);      \
  }
#define MITTENS_PREFIX(group, scope, name, F, neutral)                                                           \
  template <typename T> MITTENS_SIMD_TYPE(T)                                                                     \
  MITTENS_INLINE T group##_prefix_inclusive_##name(T data, mittens::Site site = mittens::here()) {               \
    return mittens::prefix<mittens::F>(scope, #group "_prefix_inclusive_" #name, site, data, T(neutral), true);  \
  }                                                                                                              \
  template <typename T> MITTENS_SIMD_TYPE(T)                                                                     \
  MITTENS_INLINE T group##_prefix_exclusive_##name(T data, mittens::Site site = mittens::here()) {               \
    return mittens::prefix<mittens::F>(scope, #group "_prefix_exclusive_" #name, site, data, T(neutral), false); \
  }
// Only fragment functions have helper threads.
MITTENS_INLINE bool simd_is_helper_thread() {
  return false;
}
MITTENS_LANE_OPERATIONS(simd, mittens::simdgroup_scope, 32)
MITTENS_LANE_OPERATIONS(quad, mittens::quad_scope, 4)
#undef MITTENS_LANE_OPERATIONS
#undef MITTENS_REDUCTION
#undef MITTENS_PREFIX
#undef MITTENS_SIMD_TYPE
#undef MITTENS_SIMD_BITS
#undef MITTENS_REDUCTION_OF_BITS

}  // namespace metal
