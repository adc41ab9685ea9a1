// The CPU target: every operation between threads is a call into the simulator.
#pragma once

#include "metal/lanes.h"
#include "simulator/abi.h"

// Neither traced by the watcher nor moved by the optimiser to where other lanes do not follow.
#define MITTENS_RUNTIME __attribute__((noinline, nodebug, convergent, nomerge, no_sanitize("coverage")))
#define MITTENS_CALLER __builtin_return_address(0)
#define MITTENS_FRAME (const void* const*)__builtin_frame_address(0)
// A matrix is loaded whole, also where a kernel uses one element of it: the watcher sees both.
#define MITTENS_WHOLE volatile

namespace mittens {

using abi::Memory;
using abi::Scope;
using abi::Site;
using enum abi::Memory;
using enum abi::Scope;

inline abi::Runtime* runtime;

constexpr Site here(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE()) {
  return {file, line};
}

namespace attribute {

MITTENS_INLINE uint3 triple(const unsigned (&values)[3]) {
  return uint3{values[0], values[1], values[2]};
}
#define MITTENS_ATTRIBUTE(name, value)            \
  MITTENS_RUNTIME inline auto name() {            \
    const abi::Thread& thread = *runtime->thread; \
    return value;                                 \
  }
MITTENS_ATTRIBUTE(thread_position_in_grid, triple(thread.position_in_grid))
MITTENS_ATTRIBUTE(thread_position_in_threadgroup, triple(thread.position_in_threadgroup))
MITTENS_ATTRIBUTE(threadgroup_position_in_grid, triple(thread.threadgroup))
MITTENS_ATTRIBUTE(dispatch_threads_per_threadgroup, triple(thread.dispatch_threads_per_threadgroup))
MITTENS_ATTRIBUTE(threads_per_threadgroup, triple(thread.threads_per_threadgroup))
MITTENS_ATTRIBUTE(threadgroups_per_grid, triple(thread.threadgroups))
MITTENS_ATTRIBUTE(threads_per_grid, triple(thread.threads_per_grid))
MITTENS_ATTRIBUTE(thread_index_in_threadgroup, thread.index)
MITTENS_ATTRIBUTE(thread_index_in_simdgroup, thread.lane)
MITTENS_ATTRIBUTE(simdgroup_index_in_threadgroup, thread.simdgroup)
MITTENS_ATTRIBUTE(simdgroups_per_threadgroup, thread.simdgroups)
MITTENS_ATTRIBUTE(thread_index_in_quadgroup, thread.index % abi::quad_width)
MITTENS_ATTRIBUTE(quadgroup_index_in_threadgroup, thread.index / abi::quad_width)
MITTENS_ATTRIBUTE(quadgroups_per_threadgroup, thread.quadgroups)
MITTENS_ATTRIBUTE(threads_per_simdgroup, abi::simd_width)
MITTENS_ATTRIBUTE(thread_execution_width, abi::simd_width)
MITTENS_ATTRIBUTE(grid_size, triple(thread.threads_per_grid))
MITTENS_ATTRIBUTE(grid_origin, 0 * triple(thread.threadgroup))
MITTENS_ATTRIBUTE(dispatch_simdgroups_per_threadgroup,
                  (thread.dispatch_threads_per_threadgroup[0] * thread.dispatch_threads_per_threadgroup[1] *
                       thread.dispatch_threads_per_threadgroup[2] +
                   abi::simd_width - 1) /
                      abi::simd_width)
MITTENS_ATTRIBUTE(dispatch_quadgroups_per_threadgroup,
                  (thread.dispatch_threads_per_threadgroup[0] * thread.dispatch_threads_per_threadgroup[1] *
                       thread.dispatch_threads_per_threadgroup[2] +
                   abi::quad_width - 1) /
                      abi::quad_width)
#undef MITTENS_ATTRIBUTE

}  // namespace attribute

MITTENS_INLINE unsigned lane() {
  return attribute::thread_index_in_simdgroup();
}

// Waits for all lanes of `scope` and returns their values.
MITTENS_INLINE const abi::Lanes& meet(Scope scope, const char* name, Site site, const void* caller, const void* value,
                                      unsigned bytes, abi::Combine combine = nullptr,
                                      abi::Fragments fragments = abi::no_fragments) {
  return runtime->exchange(scope, {name, site, caller, MITTENS_FRAME, fragments}, value, bytes, combine);
}

template <typename T>
MITTENS_INLINE T value_of(const abi::Lanes::Value& value) {
  T result;
  __builtin_memcpy(&result, value.bytes, sizeof(T));
  return result;
}

template <typename T>
MITTENS_RUNTIME T shuffle(Scope scope, const char* name, Site site, T value, unsigned source) {
  static_assert(sizeof(T) <= sizeof(abi::Lanes::Value));
  const unsigned width = scope == quad_scope ? abi::quad_width : abi::simd_width;
  return value_of<T>(meet(scope, name, site, MITTENS_CALLER, &value, sizeof(T)).value[source % width]);
}

template <typename T>
MITTENS_INLINE T shuffle_xor(Scope scope, const char* name, Site site, T value, unsigned mask) {
  return shuffle(scope, name, site, value, lane() ^ mask);
}

MITTENS_INLINE bool is_active(const abi::Lanes& lanes, unsigned lane) {
  return lanes.active >> lane & 1;
}

template <typename T>
MITTENS_RUNTIME T broadcast_first(Scope scope, const char* name, Site site, T value) {
  const abi::Lanes& lanes = meet(scope, name, site, MITTENS_CALLER, &value, sizeof(T));
  return value_of<T>(lanes.value[__builtin_ctz(lanes.active)]);
}

// Combines all lanes in the order of a butterfly, as the NVIDIA target does. An inactive lane takes the value of its
// partner.
template <typename T, typename F>
__attribute__((no_sanitize("coverage"))) void combine_lanes(abi::Lanes& lanes) {
  T values[abi::simd_width];
  bool has_value[abi::simd_width];
  for (unsigned i = 0; i < abi::simd_width; ++i) {
    has_value[i] = is_active(lanes, i);
    if (has_value[i]) {
      values[i] = value_of<T>(lanes.value[i]);
    }
  }
  for (unsigned step = abi::simd_width / 2; step > 0; step /= 2) {
    for (unsigned i = 0; i < step; ++i) {
      if (has_value[i + step]) {
        values[i] = has_value[i] ? F::apply(values[i], values[i + step]) : values[i + step];
        has_value[i] = true;
      }
    }
  }
  __builtin_memcpy(lanes.result.bytes, &values[0], sizeof(T));
}

template <typename F, typename T>
MITTENS_RUNTIME T reduce(Scope scope, const char* name, Site site, T value) {
  static_assert(sizeof(T) <= sizeof(abi::Lanes::Value));
  return value_of<T>(meet(scope, name, site, MITTENS_CALLER, &value, sizeof(T), combine_lanes<T, F>).result);
}

template <typename F, typename T>
MITTENS_RUNTIME T prefix(Scope scope, const char* name, Site site, T value, T first, bool inclusive) {
  const abi::Lanes& lanes = meet(scope, name, site, MITTENS_CALLER, &value, sizeof(T));
  const unsigned end = (scope == quad_scope ? lane() % abi::quad_width : lane()) + (inclusive ? 1 : 0);
  T result = first;
  for (unsigned i = 0; i < end; ++i) {
    if (is_active(lanes, i)) {
      result = F::apply(result, value_of<T>(lanes.value[i]));
    }
  }
  return result;
}

MITTENS_RUNTIME inline unsigned ballot(Scope scope, const char* name, Site site, bool value) {
  const abi::Lanes& lanes = meet(scope, name, site, MITTENS_CALLER, &value, sizeof(value));
  unsigned mask = 0;
  for (unsigned i = 0; i < abi::simd_width; ++i) {
    mask |= unsigned(is_active(lanes, i) && value_of<bool>(lanes.value[i])) << i;
  }
  return mask;
}

MITTENS_INLINE bool any(Scope scope, const char* name, Site site, bool value) {
  return ballot(scope, name, site, value) != 0;
}

MITTENS_RUNTIME inline void barrier(Scope scope, const char* name, Site site, unsigned memory) {
  runtime->barrier(scope, {name, site, MITTENS_CALLER, MITTENS_FRAME, abi::no_fragments}, memory);
}

// One 8x8 product: each lane brings two elements of a and of b, and leaves with two of a * b + c (see lane_of). T is the
// type of both operands; float where they differ.
template <typename T>
MITTENS_RUNTIME float2 matrix_multiply(Site site, float2 a, float2 b, float2 c, unsigned row, unsigned column) {
  const float4 both = {a.x, a.y, b.x, b.y};
  constexpr abi::Fragments fragments = __is_same(T, half) ? abi::half_fragments
      : __is_same(T, bfloat)                              ? abi::bfloat_fragments
                                                          : abi::float_fragments;
  const abi::Lanes& lanes =
      meet(simdgroup_scope, "simdgroup_multiply_accumulate", site, MITTENS_CALLER, &both, 16, nullptr, fragments);
  for (unsigned k = 0; k < 8; ++k) {
    const float4 left = value_of<float4>(lanes.value[lane_of(row, k)]);
    const float4 right = value_of<float4>(lanes.value[lane_of(k, column)]);
    const float factor = k % 2 ? left.y : left.x;
    c.x += factor * right.z;
    c.y += factor * right.w;
  }
  return c;
}

MITTENS_RUNTIME inline void* threadgroup_memory_of(const void* key, const char* name, unsigned long bytes, Site site) {
  return runtime->threadgroup_array(key, name, bytes, site);
}
#ifdef MITTENS_DIALECT
template <typename T>
constexpr bool has_threadgroup_constructor = false;
template <typename T>
  requires requires { typename T::mittens_in_threadgroup; }
constexpr bool has_threadgroup_constructor<T> = true;
template <typename T>
constexpr bool fits_threadgroup = __is_trivially_constructible(T) || has_threadgroup_constructor<T>;
template <typename T, unsigned long N>
constexpr bool fits_threadgroup<T[N]> = fits_threadgroup<T>;
#endif
// A pointer, since the compiler may read through a reference before the branch that reads it.
template <typename T>
MITTENS_INLINE MITTENS_THREADGROUP T* threadgroup_array(const void* key, const char* name, Site site) {
#ifdef MITTENS_DIALECT
  static_assert(fits_threadgroup<T>, "a class with a constructor is in threadgroup memory: write one that has none");
#endif
  return (MITTENS_THREADGROUP T*)threadgroup_memory_of(key, name, sizeof(T), site);
}

// The round of a loop in which lanes may part. A loop is known by its place in the code and by the call of the function
// in which it stands.
MITTENS_RUNTIME inline void begin_round() {
  const auto* frame = (const void* const*)*MITTENS_FRAME;
  const unsigned long place = (unsigned long)MITTENS_CALLER * 31 + (unsigned long)frame[1];
  const unsigned key = unsigned(place ^ place >> 32) | 1;
  abi::Rounds& rounds = runtime->thread->rounds;
  if (rounds.depth < abi::Rounds::most) {
    abi::Rounds::Loop& loop = rounds.loops[rounds.depth];
    loop = {key, loop.key == key ? loop.round + 1 : 0};
  }
  if (++rounds.depth < abi::Rounds::most) {
    rounds.loops[rounds.depth] = {};
  }
}
MITTENS_RUNTIME inline void end_round() {
  --runtime->thread->rounds.depth;
}
struct Round {
  MITTENS_INLINE Round() {
    begin_round();
  }
  Round(const Round&) = delete;
  MITTENS_INLINE ~Round() {
    end_round();
  }
};

// Other threads see an atomic operation as one: the simulator never switches threads within it.
MITTENS_RUNTIME inline void announce_atomic(const volatile void* address, unsigned long bytes, bool reads,
                                            bool writes, const void* caller) {
  runtime->atomic(address, bytes, reads, writes, caller);
}

}  // namespace mittens

namespace metal {
template <typename T, int rows, int columns>
struct simdgroup_matrix;
}  // namespace metal

namespace mittens {

// The element type of a thread's own array, whatever its number of dimensions.
template <typename T>
struct ArrayOf {
  using type = T;
};
template <typename T, unsigned long N>
struct ArrayOf<T[N]> : ArrayOf<T> {};

template <typename T>
constexpr bool is_simdgroup_matrix = false;
template <typename T, int rows, int columns>
constexpr bool is_simdgroup_matrix<metal::simdgroup_matrix<T, rows, columns>> = true;

MITTENS_RUNTIME inline void* watch_private(void* array, unsigned long bytes, unsigned long unit, const char* name) {
  return runtime->private_array(array, bytes, unit, name);
}

// An array that is declared without values, for as long as it lives. A pointer, since the compiler may read an array
// before the branch that reads it. It lies in a fence, which shows an index beyond it through a pointer. Constructors of
// its elements have written it. Left out are simdgroup matrices, whose components the library writes, and vectors of
// bool, which clang packs into bits.
template <typename A>
struct Fenced {
  char before[abi::fence];
  A array;
  char after[abi::fence];
};
struct NoFence {};
template <typename A>
struct PrivateArray {
  using Value = typename ArrayOf<A>::type;
  static constexpr bool is_watched = __is_trivially_constructible(Value) && !is_simdgroup_matrix<Value> &&
                                     !(Vector<Value>::is_vector && __is_same(Element<Value>, bool));
  using Fence = metal::conditional_t<is_watched, Fenced<A>, NoFence>;
  A* array;
  MITTENS_INLINE PrivateArray(A& memory, Fence& fence, const char* name) : array(&memory) {
    if constexpr (is_watched) {
      array = (A*)watch_private(&fence.array, sizeof(A), sizeof(Value), name);
    }
  }
  PrivateArray(const PrivateArray&) = delete;
  MITTENS_INLINE ~PrivateArray() {
    if constexpr (is_watched) {
      watch_private(array, sizeof(A), sizeof(Value), nullptr);
    }
  }
};

}  // namespace mittens

#define MITTENS_PRIVATE_ARRAY(name)                                                                          \
  typename ::mittens::PrivateArray<decltype(name##_memory)>::Fence name##_fence;                             \
  const ::mittens::PrivateArray<decltype(name##_memory)> name##_watched(name##_memory, name##_fence, #name); \
  auto& name = *name##_watched.array;
#define MITTENS_THREADGROUP_ARRAY(name, ...) \
  static char name##_key;                    \
  auto& name = *::mittens::threadgroup_array<__VA_ARGS__>(&name##_key, #name, ::mittens::here())
