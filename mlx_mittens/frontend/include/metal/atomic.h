// Atomics, relaxed as Metal's are.
#pragma once

namespace mittens {

template <typename T>
using Bits = metal::conditional_t<sizeof(T) == 8, ulong, uint>;

}  // namespace mittens

namespace metal {

enum memory_order { memory_order_relaxed = __ATOMIC_RELAXED, memory_order_seq_cst = __ATOMIC_SEQ_CST };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };

template <typename T>
struct atomic {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomic of a type that is neither 4 nor 8 bytes wide");
  T value;
};
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_ulong = atomic<ulong>;
using atomic_float = atomic<float>;
using atomic_bool = atomic<uint>;

MITTENS_INLINE void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

// Each is a function of its own that the watcher does not trace: it is told of the access as an atomic one instead.
#if defined(__NVPTX__) || defined(__SPIRV__)
#define MITTENS_ATOMIC MITTENS_INLINE
#define MITTENS_ANNOUNCE(reads)
#else
#define MITTENS_ATOMIC MITTENS_RUNTIME
#define MITTENS_ANNOUNCE(reads)                                                                                        \
  mittens::announce_atomic((const volatile void*)object, sizeof(T), reads, MITTENS_CALLER)
#endif
#ifdef __SPIRV__
// Mesa has no atomics of float. As instructions they are like those of integers.
#define MITTENS_ATOMIC_NUMBER(space)                                                                                   \
  ((volatile space metal::conditional_t<__is_floating_point(T), mittens::Bits<T>, T>*)&object->value)
#else
#define MITTENS_ATOMIC_NUMBER(space) &object->value
#endif
#define MITTENS_FETCH(space, name, builtin)                                                                            \
  template <typename T, typename U>                                                                                    \
  MITTENS_ATOMIC T atomic_fetch_##name##_explicit(volatile space atomic<T>* object, U operand, memory_order) {         \
    MITTENS_ANNOUNCE(true);                                                                                            \
    return __atomic_fetch_##builtin(MITTENS_ATOMIC_NUMBER(space), T(operand), __ATOMIC_RELAXED);                       \
  }
#define MITTENS_ATOMICS(space)                                                                                         \
  template <typename T>                                                                                                \
  MITTENS_ATOMIC T atomic_load_explicit(const volatile space atomic<T>* object, memory_order) {                        \
    MITTENS_ANNOUNCE(true);                                                                                            \
    return as_type<T>(__atomic_load_n((const volatile space mittens::Bits<T>*)object, __ATOMIC_RELAXED));              \
  }                                                                                                                    \
  template <typename T, typename U>                                                                                    \
  MITTENS_ATOMIC void atomic_store_explicit(volatile space atomic<T>* object, U desired, memory_order) {               \
    MITTENS_ANNOUNCE(false);                                                                                           \
    __atomic_store_n((volatile space mittens::Bits<T>*)object, as_type<mittens::Bits<T>>(T(desired)),                  \
                     __ATOMIC_RELAXED);                                                                                \
  }                                                                                                                    \
  template <typename T, typename U>                                                                                    \
  MITTENS_ATOMIC T atomic_exchange_explicit(volatile space atomic<T>* object, U desired, memory_order) {               \
    MITTENS_ANNOUNCE(true);                                                                                            \
    return as_type<T>(__atomic_exchange_n((volatile space mittens::Bits<T>*)object,                                    \
                                          as_type<mittens::Bits<T>>(T(desired)), __ATOMIC_RELAXED));                   \
  }                                                                                                                    \
  template <typename T, typename U>                                                                                    \
  MITTENS_ATOMIC bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>* object, T* expected, U desired,  \
                                                            memory_order, memory_order) {                              \
    MITTENS_ANNOUNCE(true);                                                                                            \
    mittens::Bits<T> seen = as_type<mittens::Bits<T>>(*expected);                                                      \
    const bool same = __atomic_compare_exchange_n((volatile space mittens::Bits<T>*)object, &seen,                     \
                                                  as_type<mittens::Bits<T>>(T(desired)), true, __ATOMIC_RELAXED,       \
                                                  __ATOMIC_RELAXED);                                                   \
    *expected = as_type<T>(seen);                                                                                      \
    return same;                                                                                                       \
  }                                                                                                                    \
  MITTENS_FETCH(space, add, add)                                                                                       \
  MITTENS_FETCH(space, sub, sub)                                                                                       \
  MITTENS_FETCH(space, min, min)                                                                                       \
  MITTENS_FETCH(space, max, max)                                                                                       \
  MITTENS_FETCH(space, and, and)                                                                                       \
  MITTENS_FETCH(space, or, or)                                                                                         \
  MITTENS_FETCH(space, xor, xor)
MITTENS_ATOMICS(MITTENS_DEVICE)
MITTENS_ATOMICS(MITTENS_THREADGROUP)
#undef MITTENS_ATOMICS
#undef MITTENS_FETCH
#undef MITTENS_ATOMIC_NUMBER
#undef MITTENS_ANNOUNCE
#undef MITTENS_ATOMIC

}  // namespace metal
