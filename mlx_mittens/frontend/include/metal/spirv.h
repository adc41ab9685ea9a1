// The target of Apple GPUs without a Mac: SPIR-V in OpenCL's form, for Mesa's compiler of their machine code. Nothing
// compiled from this is run; it is there to count registers and instructions.
//
// Functions named nir_... are operations of Mesa's compiler. Where OpenCL has the operation, its name is used.
#pragma once

#include "metal/gpu_base.h"

#define MITTENS_PURE __attribute__((const))
#define MITTENS_TOGETHER __attribute__((convergent))

extern "C" {
uint MITTENS_PURE nir_load_subgroup_invocation();
uint MITTENS_PURE nir_load_subgroup_id();
uint MITTENS_PURE nir_load_local_invocation_index();
uint3 MITTENS_PURE nir_load_local_invocation_id();
uint3 MITTENS_PURE nir_load_workgroup_id();
uint3 MITTENS_PURE nir_load_workgroup_size();
uint MITTENS_PURE nir_bitfield_reverse(uint);
}
#define MITTENS_OPENCL(T)                                     \
  MITTENS_TOGETHER T sub_group_shuffle(T, uint);              \
  MITTENS_TOGETHER T sub_group_shuffle_xor(T, uint);          \
  MITTENS_TOGETHER T sub_group_reduce_add(T);                 \
  MITTENS_TOGETHER T sub_group_reduce_min(T);                 \
  MITTENS_TOGETHER T sub_group_reduce_max(T);                 \
  MITTENS_TOGETHER T sub_group_scan_inclusive_add(T);         \
  MITTENS_TOGETHER T sub_group_scan_exclusive_add(T);         \
  MITTENS_TOGETHER T sub_group_non_uniform_reduce_mul(T);
MITTENS_OPENCL(float)
MITTENS_OPENCL(int)
MITTENS_OPENCL(uint)
#undef MITTENS_OPENCL
// OpenCL's half is mangled as Dh, clang's as DF16_.
#define MITTENS_OPENCL(name, length) MITTENS_TOGETHER half sub_group_##name(half) __asm__("_Z" #length "sub_group_" #name "Dh");
MITTENS_OPENCL(reduce_add, 20)
MITTENS_OPENCL(reduce_min, 20)
MITTENS_OPENCL(reduce_max, 20)
MITTENS_OPENCL(scan_inclusive_add, 28)
MITTENS_OPENCL(scan_exclusive_add, 28)
MITTENS_OPENCL(non_uniform_reduce_mul, 32)
#undef MITTENS_OPENCL
#define MITTENS_OPENCL(T)                                     \
  MITTENS_TOGETHER T sub_group_non_uniform_reduce_and(T);     \
  MITTENS_TOGETHER T sub_group_non_uniform_reduce_or(T);      \
  MITTENS_TOGETHER T sub_group_non_uniform_reduce_xor(T);
MITTENS_OPENCL(int)
MITTENS_OPENCL(uint)
#undef MITTENS_OPENCL
MITTENS_TOGETHER ushort sub_group_shuffle(ushort, uint);
MITTENS_TOGETHER ushort sub_group_shuffle_xor(ushort, uint);
MITTENS_TOGETHER uint4 sub_group_ballot(int);
MITTENS_TOGETHER void __spirv_ControlBarrier(uint, uint, uint);
ulong MITTENS_PURE mul_hi(ulong, ulong);
long MITTENS_PURE mul_hi(long, long);
ulong MITTENS_PURE mad_sat(ulong, ulong, ulong);
long MITTENS_PURE mad_sat(long, long, long);

namespace mittens {

namespace attribute {

MITTENS_INLINE uint3 thread_position_in_threadgroup() {
  return nir_load_local_invocation_id();
}
MITTENS_INLINE uint3 threadgroup_position_in_grid() {
  return nir_load_workgroup_id();
}
MITTENS_INLINE uint3 threads_per_threadgroup() {
  return nir_load_workgroup_size();
}
// How many threadgroups there are is not in a register of the GPU: it comes with the arguments.
MITTENS_INLINE uint3 threadgroups_per_grid(uint3 threadgroups) {
  return threadgroups;
}
MITTENS_INLINE uint3 threads_per_grid(uint3 threadgroups) {
  return threadgroups * nir_load_workgroup_size();
}
MITTENS_INLINE uint3 grid_size(uint3 threadgroups) {
  return threads_per_grid(threadgroups);
}
MITTENS_INLINE uint3 thread_position_in_grid() {
  return nir_load_workgroup_id() * nir_load_workgroup_size() + nir_load_local_invocation_id();
}
MITTENS_INLINE uint thread_index_in_threadgroup() {
  return nir_load_local_invocation_index();
}
MITTENS_INLINE uint thread_index_in_simdgroup() {
  return nir_load_subgroup_invocation();
}
MITTENS_INLINE uint simdgroup_index_in_threadgroup() {
  return nir_load_subgroup_id();
}

}  // namespace attribute

template <typename T>
constexpr bool is_native = __is_same(T, float) || __is_same(T, half) || __is_same(T, int) || __is_same(T, uint);

// A value goes through the simdgroup in words of 16 or 32 bits.
template <typename T, typename F>
MITTENS_INLINE T by_words(T value, F shuffle_word) {
  if constexpr (Vector<T>::is_vector) {
    T result;
    for (int i = 0; i < Vector<T>::size; ++i) {
      result[i] = by_words(Element<T>(value[i]), shuffle_word);
    }
    return result;
  } else if constexpr (sizeof(T) == 1) {
    return T(shuffle_word(ushort(value)));
  } else if constexpr (sizeof(T) == 2) {
    return __builtin_bit_cast(T, shuffle_word(__builtin_bit_cast(ushort, value)));
  } else if constexpr (is_native<T>) {
    return shuffle_word(value);
  } else {
    constexpr int words = (sizeof(T) + 3) / 4;
    uint word[words] = {};
    __builtin_memcpy(word, &value, sizeof(T));
    for (int i = 0; i < words; ++i) {
      word[i] = shuffle_word(word[i]);
    }
    __builtin_memcpy(&value, word, sizeof(T));
    return value;
  }
}

template <typename T>
MITTENS_INLINE T shuffle(Scope scope, const char*, Site, T value, unsigned source) {
  const unsigned from = scope == quad_scope ? (lane() & ~3u) + source % 4 : source;
  return by_words(value, [from](auto word) { return sub_group_shuffle(word, from); });
}

template <typename T>
MITTENS_INLINE T shuffle_xor(T value, unsigned mask) {
  return by_words(value, [mask](auto word) { return sub_group_shuffle_xor(word, mask); });
}
template <typename T>
MITTENS_INLINE T shuffle_xor(Scope scope, const char*, Site, T value, unsigned mask) {
  return shuffle_xor(value, scope == quad_scope ? mask % 4 : mask % 32);
}

}  // namespace mittens

#include "metal/gpu.h"

namespace mittens {

struct Sum;
struct Product;
struct Minimum;
struct Maximum;
struct And;
struct Or;
struct Xor;

// One instruction for a number of 16 or 32 bits of a simdgroup; a butterfly for the rest.
template <typename F, typename T>
MITTENS_INLINE T reduce(Scope scope, const char* name, Site site, T value) {
  if constexpr (Vector<T>::is_vector) {
    T result;
    for (int i = 0; i < Vector<T>::size; ++i) {
      result[i] = reduce<F>(scope, name, site, Element<T>(value[i]));
    }
    return result;
  } else if constexpr (__is_same(T, bfloat)) {
    return T(reduce<F>(scope, name, site, float(value)));
  } else if constexpr (__is_integral(T) && sizeof(T) < 4) {
    using Wide = metal::conditional_t<__is_signed(T), int, uint>;
    return T(reduce<F>(scope, name, site, Wide(value)));
  } else {
    if constexpr (is_native<T>) {
      if (scope == simdgroup_scope) {
        if constexpr (__is_same(F, Sum)) {
          return sub_group_reduce_add(value);
        } else if constexpr (__is_same(F, Product)) {
          return sub_group_non_uniform_reduce_mul(value);
        } else if constexpr (__is_same(F, Minimum)) {
          return sub_group_reduce_min(value);
        } else if constexpr (__is_same(F, Maximum)) {
          return sub_group_reduce_max(value);
        } else if constexpr (__is_same(F, And)) {
          return sub_group_non_uniform_reduce_and(value);
        } else if constexpr (__is_same(F, Or)) {
          return sub_group_non_uniform_reduce_or(value);
        } else if constexpr (__is_same(F, Xor)) {
          return sub_group_non_uniform_reduce_xor(value);
        }
      }
    }
    return reduce_by_exchanges<F>(scope, value);
  }
}

template <typename F, typename T>
MITTENS_INLINE T prefix(Scope scope, const char*, Site, T value, T first, bool inclusive) {
  if constexpr (is_native<T> && __is_same(F, Sum)) {
    if (scope == simdgroup_scope) {
      return inclusive ? sub_group_scan_inclusive_add(value) : sub_group_scan_exclusive_add(value);
    }
  }
  return prefix_by_shuffles<F>(scope, value, first, inclusive);
}

MITTENS_INLINE unsigned ballot(Scope scope, const char*, Site, bool value) {
  return bits_of_scope(scope, sub_group_ballot(value).x);
}

MITTENS_INLINE bool any(Scope scope, const char* name, Site site, bool value) {
  return ballot(scope, name, site, value) != 0;
}

MITTENS_INLINE void barrier(Scope scope, const char*, Site, unsigned memory) {
  constexpr unsigned workgroup = 2, subgroup = 3, acquire_release = 0x8, of_workgroup = 0x100, of_device = 0x200;
  const unsigned semantics = (memory & threadgroup_memory ? acquire_release | of_workgroup : 0) |
      (memory & device_memory ? acquire_release | of_device : 0);
  if (scope == threadgroup_scope) {
    __spirv_ControlBarrier(workgroup, workgroup, semantics);
  } else {
    __spirv_ControlBarrier(subgroup, subgroup, semantics);
  }
}

// A product of 8x8 matrices, which Mesa's compiler does not know. Each stands as three instructions that read and write
// the registers of the real one: two multiply-adds, and a reversal of bits, which marks it and which kernels themselves
// do not use. Half operands are widened within the multiply-adds.
template <typename V>
MITTENS_INLINE float2 tensor_multiply(V a, V b, float2 c) {
  const float x = __builtin_fmaf(float(a.x), float(b.x), c.x);
  const float y = __builtin_fmaf(float(a.y), float(b.y), c.y);
  return float2{__builtin_bit_cast(float, nir_bitfield_reverse(__builtin_bit_cast(uint, x))), y};
}
template <typename T>
MITTENS_INLINE float2 matrix_multiply(Site, float2 a, float2 b, float2 c, unsigned, unsigned) {
  return tensor_multiply(a, b, c);
}
#define MITTENS_MATRIX_LANES

}  // namespace mittens
