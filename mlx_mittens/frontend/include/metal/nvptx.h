// The NVIDIA target: a simdgroup is a warp. Threadgroups are one-dimensional or 32 wide.
//
// Metal's lane numbers are the warp's own but in kernels that multiply matrices (MITTENS_MATRIX_LANES): there they are
// such that the tensor cores take the same elements of a matrix from each lane as Metal does (metal/lanes.h). One order
// permutes the bits of the other's lane number, so an exchange by xor remains an exchange by xor.
#pragma once

#include "metal/gpu_base.h"

namespace mittens {

constexpr unsigned all_lanes = 0xffffffff;

// The lane of the warp that has a number of Metal's, and the other way round. The tensor cores have row l / 4 and columns
// 2 * (l % 4), + 1 in lane l.
MITTENS_INLINE constexpr unsigned warp_lane(unsigned lane) {
#ifdef MITTENS_MATRIX_LANES
  return row_of(lane) * 4 + column_of(lane) / 2;
#else
  return lane;
#endif
}
MITTENS_INLINE constexpr unsigned metal_lane(unsigned warp_lane) {
#ifdef MITTENS_MATRIX_LANES
  return lane_of(warp_lane / 4, warp_lane % 4 * 2);
#else
  return warp_lane;
#endif
}

namespace attribute {

#define MITTENS_REGISTER(name)                                                          \
  MITTENS_INLINE uint3 name() {                                                         \
    return uint3{uint(__nvvm_read_ptx_sreg_##name##_x()), uint(__nvvm_read_ptx_sreg_##name##_y()), \
                 uint(__nvvm_read_ptx_sreg_##name##_z())};                              \
  }
MITTENS_REGISTER(tid)
MITTENS_REGISTER(ntid)
MITTENS_REGISTER(ctaid)
MITTENS_REGISTER(nctaid)
#undef MITTENS_REGISTER

MITTENS_INLINE uint3 thread_position_in_threadgroup() {
  const uint3 position = tid();
  return uint3{(position.x & ~31u) | metal_lane(position.x % 32), position.y, position.z};
}
MITTENS_INLINE uint3 threadgroup_position_in_grid() {
  return ctaid();
}
MITTENS_INLINE uint3 threads_per_threadgroup() {
  return ntid();
}
MITTENS_INLINE uint3 threadgroups_per_grid() {
  return nctaid();
}
MITTENS_INLINE uint3 threads_per_grid() {
  return nctaid() * ntid();
}
MITTENS_INLINE uint3 grid_size() {
  return threads_per_grid();
}
MITTENS_INLINE uint3 thread_position_in_grid() {
  return ctaid() * ntid() + thread_position_in_threadgroup();
}
MITTENS_INLINE uint thread_index_in_threadgroup() {
  const uint3 position = thread_position_in_threadgroup();
  return position.x + ntid().x * (position.y + ntid().y * position.z);
}
MITTENS_INLINE uint thread_index_in_simdgroup() {
  return metal_lane(__nvvm_read_ptx_sreg_laneid());
}
MITTENS_INLINE uint simdgroup_index_in_threadgroup() {
  return thread_index_in_threadgroup() / 32;
}

}  // namespace attribute

// A value goes through the warp in 32-bit words.
template <typename T, typename F>
MITTENS_INLINE T by_words(T value, F shuffle_word) {
  constexpr int words = (sizeof(T) + 3) / 4;
  int word[words] = {};
  __builtin_memcpy(word, &value, sizeof(T));
  for (int i = 0; i < words; ++i) {
    word[i] = shuffle_word(word[i]);
  }
  __builtin_memcpy(&value, word, sizeof(T));
  return value;
}

template <typename T>
MITTENS_INLINE T shuffle(Scope scope, const char*, Site, T value, unsigned source) {
  const unsigned from = warp_lane(scope == quad_scope ? (lane() & ~3u) + source % 4 : source);
  return by_words(value, [from](int word) { return __nvvm_shfl_sync_idx_i32(all_lanes, word, from, 31); });
}

template <typename T>
MITTENS_INLINE T shuffle_xor(T value, unsigned mask) {
  const unsigned bits = warp_lane(mask);
  return by_words(value, [bits](int word) { return __nvvm_shfl_sync_bfly_i32(all_lanes, word, bits, 31); });
}
template <typename T>
MITTENS_INLINE T shuffle_xor(Scope scope, const char* name, Site site, T value, unsigned mask) {
#ifdef MITTENS_MATRIX_LANES
  return shuffle_xor(value, scope == quad_scope ? mask % 4 : mask % 32);
#else
  return shuffle(scope, name, site, value, lane() ^ mask);  // so that ptxas finds registers for prompts in float32
#endif
}

}  // namespace mittens

#include "metal/gpu.h"

namespace mittens {

template <typename F, typename T>
MITTENS_INLINE T reduce(Scope scope, const char*, Site, T value) {
  if constexpr (__is_same(T, int) || __is_same(T, uint)) {
    if (scope == simdgroup_scope && F::has_redux) {
      return F::redux(value);
    }
  }
  return reduce_by_exchanges<F>(scope, value);
}

template <typename F, typename T>
MITTENS_INLINE T prefix(Scope scope, const char*, Site, T value, T first, bool inclusive) {
  return prefix_by_shuffles<F>(scope, value, first, inclusive);
}

// mask with the bits whose numbers differ in bits i and i + by of the number in each other's place.
template <unsigned i, unsigned by>
MITTENS_INLINE constexpr unsigned exchanged(unsigned mask) {
  constexpr unsigned apart = (1u << (i + by)) - (1u << i);
  unsigned moved = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    moved |= (lane >> i & 1) && !(lane >> (i + by) & 1) ? 1u << lane : 0;
  }
  const unsigned differ = (mask ^ mask >> apart) & moved;
  return mask ^ differ ^ differ << apart;
}

MITTENS_INLINE unsigned ballot(Scope scope, const char*, Site, bool value) {
  unsigned mask = __nvvm_vote_ballot_sync(all_lanes, value);
#ifdef MITTENS_MATRIX_LANES
  mask = exchanged<1, 1>(mask);  // bits 1, 2 and 3 of the warp's numbers are bits 3, 1 and 2 of Metal's
  mask = exchanged<2, 1>(mask);
#endif
  return bits_of_scope(scope, mask);
}

MITTENS_INLINE bool any(Scope scope, const char* name, Site site, bool value) {
  return scope == quad_scope ? ballot(scope, name, site, value) != 0
                             : __nvvm_vote_ballot_sync(all_lanes, value) != 0;
}

MITTENS_INLINE void barrier(Scope scope, const char*, Site, unsigned) {
  if (scope == threadgroup_scope) {
    __syncthreads();
  } else {
    __nvvm_bar_warp_sync(all_lanes);
  }
}

// From the lane whose number has this lane's bits where `own` has ones, and the bits of `source` elsewhere. With a
// constant source the lane number takes no register.
template <unsigned own, typename T>
MITTENS_INLINE T shuffle_beside(T value, unsigned source) {
  constexpr unsigned kept = warp_lane(own);
  const unsigned from = warp_lane(source);
  return by_words(value, [from](int word) { return __nvvm_shfl_sync_idx_i32(all_lanes, word, from, kept << 8 | 31); });
}

// One 8x8 product: each lane brings two elements of a and of b, and leaves with two of a * b + c (see lane_of).
template <typename T>
MITTENS_INLINE float2 matrix_multiply(Site, float2 a, float2 b, float2 c, unsigned, unsigned) {
  constexpr unsigned own_row = lane_of(7, 0);
  constexpr unsigned own_column = lane_of(0, 7);
  for (unsigned k = 0; k < 8; k += 2) {
    const float2 left = shuffle_beside<own_row>(a, lane_of(0, k));
    const float2 upper = shuffle_beside<own_column>(b, lane_of(k, 0));
    const float2 lower = shuffle_beside<own_column>(b, lane_of(k + 1, 0));
    c += left.x * upper;
    c += left.y * lower;
  }
  return c;
}

#ifdef MITTENS_MATRIX_LANES
// The same on the tensor cores, which want the transposed of b. mma_lowering.py makes real instructions of these.
MITTENS_INLINE unsigned transposed_words(unsigned word) {
  unsigned turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(word));
  return turned;
}

template <typename V>
MITTENS_INLINE float2 tensor_multiply(V a, V b, float2 c) {
  unsigned left, right;
  __builtin_memcpy(&left, &a, 4);
  __builtin_memcpy(&right, &b, 4);
  const unsigned turned = transposed_words(right);
  float2 product;
  if constexpr (__is_same(V, metal::vec<bfloat, 2>)) {
    asm volatile("mittens.multiply.bf16 {%0, %1}, {%2}, {%3}, {%4, %5};"
                 : "=f"(product.x), "=f"(product.y)
                 : "r"(left), "r"(turned), "f"(c.x), "f"(c.y));
  } else {
    asm volatile("mittens.multiply.f16 {%0, %1}, {%2}, {%3}, {%4, %5};"
                 : "=f"(product.x), "=f"(product.y)
                 : "r"(left), "r"(turned), "f"(c.x), "f"(c.y));
  }
  return product;
}

MITTENS_INLINE float2 tensor_multiply(float2 a, float2 b, float2 c) {
  const unsigned x = __builtin_bit_cast(unsigned, float(b.x));
  const unsigned y = __builtin_bit_cast(unsigned, float(b.y));
  const unsigned lower = transposed_words(__nvvm_prmt(x, y, 0x5410));
  const unsigned upper = transposed_words(__nvvm_prmt(x, y, 0x7632));
  float2 product;
  asm volatile("mittens.multiply.f32 {%0, %1}, {%2, %3}, {%4, %5}, {%6, %7};"
               : "=f"(product.x), "=f"(product.y)
               : "f"(a.x), "f"(a.y), "r"(__nvvm_prmt(lower, upper, 0x5410)), "r"(__nvvm_prmt(lower, upper, 0x7632)),
                 "f"(c.x), "f"(c.y));
  return product;
}
#endif

}  // namespace mittens
