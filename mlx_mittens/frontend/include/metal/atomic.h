// Atomics, relaxed as Metal's are.
#pragma once

namespace mittens {

template <typename T>
using Bits = metal::conditional_t<sizeof(T) == 8, ulong, metal::conditional_t<sizeof(T) == 1, uchar, uint>>;

}  // namespace mittens

namespace metal {

enum memory_order {
  memory_order_relaxed = __ATOMIC_RELAXED,
#if !defined(MITTENS_METAL_VERSION) || MITTENS_METAL_VERSION >= 320
  memory_order_acquire = __ATOMIC_ACQUIRE,
  memory_order_release = __ATOMIC_RELEASE,
  memory_order_acq_rel = __ATOMIC_ACQ_REL,
#endif
  memory_order_seq_cst = __ATOMIC_SEQ_CST
};
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };

#ifdef MITTENS_DIALECT
// A constraint is seen where the type is named, also behind a pointer that nothing reads.
template <typename T>
  requires(is_any_of<T, int, uint, bool, float, ulong>())
struct atomic {
#else
template <typename T>
struct atomic {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomic of a type that is neither 4 nor 8 bytes wide");
#endif
  T value;
};
template <typename T>
using _atomic = atomic<T>;  // the name in Metal's header, which kernels use too
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_ulong = atomic<ulong>;
using atomic_float = atomic<float>;
#ifdef MITTENS_DIALECT
using atomic_bool = atomic<bool>;
#else
using atomic_bool = atomic<uint>;
#endif

MITTENS_INLINE void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

// Each is a function of its own that the watcher does not trace: it is told of the access as an atomic one instead.
#if defined(__NVPTX__) || defined(__SPIRV__)
#define MITTENS_ATOMIC MITTENS_INLINE
#define MITTENS_ANNOUNCE(reads, writes)
#else
#define MITTENS_ATOMIC MITTENS_RUNTIME
#define MITTENS_ANNOUNCE(reads, writes) \
  mittens::announce_atomic((const volatile void*)object, sizeof(T), reads, writes, MITTENS_CALLER)
#endif
#ifdef __SPIRV__
// Mesa has no atomics of float. We use the atomics of integers, whose instructions are the same.
#define MITTENS_ATOMIC_NUMBER(space) \
  ((volatile space metal::conditional_t<__is_floating_point(T), mittens::Bits<T>, T>*)&object->value)
#else
#define MITTENS_ATOMIC_NUMBER(space) &object->value
#endif
// Which types the operations take.
#ifdef MITTENS_DIALECT
#define MITTENS_SUM_TYPE(T)                                                                                      \
  __attribute__((diagnose_if(!metal::is_any_of<T, int, uint, float>(),                                           \
                             "atomic sums are of int, uint and float; atomic_ulong has atomic_max_explicit and " \
                             "atomic_min_explicit alone", "error")))
#define MITTENS_BITS_TYPE(T)                                                                                    \
  __attribute__((diagnose_if(!metal::is_any_of<T, int, uint>(),                                                 \
                             "this atomic operation is of int and uint: write a loop of "                       \
                             "atomic_compare_exchange_weak_explicit; atomic_ulong has atomic_max_explicit and " \
                             "atomic_min_explicit", "error")))
#define MITTENS_LONG_TYPE(T)                                                                                      \
  __attribute__((diagnose_if(!__is_same(T, ulong), "this is of atomic_ulong: write atomic_fetch_max_explicit or " \
                                                   "atomic_fetch_min_explicit", "error")))
#define MITTENS_MEMORY_TYPE(T, shared)                                                                          \
  __attribute__((diagnose_if(shared && metal::is_any_of<T, float, ulong>(),                                     \
                             "atomic_float and atomic_ulong are of device memory alone: in threadgroup memory " \
                             "keep the bits in an atomic_uint, and write a loop of "                            \
                             "atomic_compare_exchange_weak_explicit", "error")))
#else
#define MITTENS_MEMORY_TYPE(T, shared)
#define MITTENS_SUM_TYPE(T)
#define MITTENS_BITS_TYPE(T)
#define MITTENS_LONG_TYPE(T)
#endif
#define MITTENS_FETCH(space, shared, name, builtin, types)                                                     \
  template <typename T, typename U> types(T) MITTENS_MEMORY_TYPE(T, shared)                                    \
  MITTENS_ATOMIC T atomic_fetch_##name##_explicit(volatile space atomic<T>* object, U operand, memory_order) { \
    MITTENS_ANNOUNCE(true, true);                                                                              \
    return __atomic_fetch_##builtin(MITTENS_ATOMIC_NUMBER(space), T(operand), __ATOMIC_RELAXED);               \
  }
#define MITTENS_UPDATE(space, shared, name)                                                                 \
  template <typename T, typename U> MITTENS_LONG_TYPE(T) MITTENS_MEMORY_TYPE(T, shared)                     \
  MITTENS_ATOMIC void atomic_##name##_explicit(volatile space atomic<T>* object, U operand, memory_order) { \
    MITTENS_ANNOUNCE(false, true);                                                                          \
    __atomic_fetch_##name(MITTENS_ATOMIC_NUMBER(space), T(operand), __ATOMIC_RELAXED);                      \
  }
#define MITTENS_ATOMICS(space, shared)                                                                                \
  template <typename T> MITTENS_MEMORY_TYPE(T, shared)                                                                \
  MITTENS_ATOMIC T atomic_load_explicit(const volatile space atomic<T>* object, memory_order) {                       \
    MITTENS_ANNOUNCE(true, false);                                                                                    \
    return as_type<T>(__atomic_load_n((const volatile space mittens::Bits<T>*)object, __ATOMIC_RELAXED));             \
  }                                                                                                                   \
  template <typename T, typename U> MITTENS_MEMORY_TYPE(T, shared)                                                    \
  MITTENS_ATOMIC void atomic_store_explicit(volatile space atomic<T>* object, U desired, memory_order) {              \
    MITTENS_ANNOUNCE(false, true);                                                                                    \
    __atomic_store_n((volatile space mittens::Bits<T>*)object, as_type<mittens::Bits<T>>(T(desired)),                 \
                     __ATOMIC_RELAXED);                                                                               \
  }                                                                                                                   \
  template <typename T, typename U> MITTENS_MEMORY_TYPE(T, shared)                                                    \
  MITTENS_ATOMIC T atomic_exchange_explicit(volatile space atomic<T>* object, U desired, memory_order) {              \
    MITTENS_ANNOUNCE(true, true);                                                                                     \
    return as_type<T>(__atomic_exchange_n((volatile space mittens::Bits<T>*)object,                                   \
                                          as_type<mittens::Bits<T>>(T(desired)), __ATOMIC_RELAXED));                  \
  }                                                                                                                   \
  template <typename T, typename U> MITTENS_MEMORY_TYPE(T, shared)                                                    \
  MITTENS_ATOMIC bool atomic_compare_exchange_weak_explicit(volatile space atomic<T>* object, T* expected, U desired, \
                                                            memory_order, memory_order) {                             \
    MITTENS_ANNOUNCE(true, true);                                                                                     \
    mittens::Bits<T> seen = as_type<mittens::Bits<T>>(*expected);                                                     \
    const bool same = __atomic_compare_exchange_n((volatile space mittens::Bits<T>*)object, &seen,                    \
                                                  as_type<mittens::Bits<T>>(T(desired)), true, __ATOMIC_RELAXED,      \
                                                  __ATOMIC_RELAXED);                                                  \
    *expected = as_type<T>(seen);                                                                                     \
    return same;                                                                                                      \
  }                                                                                                                   \
  MITTENS_FETCH(space, shared, add, add, MITTENS_SUM_TYPE)                                                            \
  MITTENS_FETCH(space, shared, sub, sub, MITTENS_SUM_TYPE)                                                            \
  MITTENS_FETCH(space, shared, min, min, MITTENS_BITS_TYPE)                                                           \
  MITTENS_FETCH(space, shared, max, max, MITTENS_BITS_TYPE)                                                           \
  MITTENS_FETCH(space, shared, and, and, MITTENS_BITS_TYPE)                                                           \
  MITTENS_FETCH(space, shared, or, or, MITTENS_BITS_TYPE)                                                             \
  MITTENS_FETCH(space, shared, xor, xor, MITTENS_BITS_TYPE)                                                           \
  MITTENS_UPDATE(space, shared, min)                                                                                  \
  MITTENS_UPDATE(space, shared, max)
MITTENS_ATOMICS(MITTENS_DEVICE, false)
MITTENS_ATOMICS(MITTENS_THREADGROUP, true)
#undef MITTENS_ATOMICS
#undef MITTENS_FETCH
#undef MITTENS_UPDATE
#undef MITTENS_SUM_TYPE
#undef MITTENS_BITS_TYPE
#undef MITTENS_LONG_TYPE
#undef MITTENS_MEMORY_TYPE
#undef MITTENS_ATOMIC_NUMBER
#undef MITTENS_ANNOUNCE
#undef MITTENS_ATOMIC

}  // namespace metal
