// The NVIDIA target: a simdgroup is a warp. Threadgroups are one-dimensional or 32 wide.
#pragma once

#include "metal/lanes.h"

namespace mittens {

enum Scope : unsigned { quad_scope, simdgroup_scope, threadgroup_scope };
enum Memory : unsigned { no_memory = 0, device_memory = 1, threadgroup_memory = 2 };

// Where an operation stands matters to the simulator alone.
struct Site {};
constexpr Site here() {
  return {};
}

#define MITTENS_CALLER nullptr

constexpr unsigned all_lanes = 0xffffffff;

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
  return tid();
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
MITTENS_INLINE uint3 thread_position_in_grid() {
  return ctaid() * ntid() + tid();
}
MITTENS_INLINE uint thread_index_in_threadgroup() {
  return tid().x + ntid().x * (tid().y + ntid().y * tid().z);
}
MITTENS_INLINE uint thread_index_in_simdgroup() {
  return __nvvm_read_ptx_sreg_laneid();
}
MITTENS_INLINE uint simdgroup_index_in_threadgroup() {
  return thread_index_in_threadgroup() / 32;
}
MITTENS_INLINE uint simdgroups_per_threadgroup() {
  return (ntid().x * ntid().y * ntid().z + 31) / 32;
}

MITTENS_INLINE uint3 dispatch_threads_per_threadgroup() {
  return ntid();
}
MITTENS_INLINE uint thread_index_in_quadgroup() {
  return thread_index_in_threadgroup() % 4;
}
MITTENS_INLINE uint quadgroup_index_in_threadgroup() {
  return thread_index_in_threadgroup() / 4;
}
MITTENS_INLINE uint quadgroups_per_threadgroup() {
  return (ntid().x * ntid().y * ntid().z + 3) / 4;
}
MITTENS_INLINE uint threads_per_simdgroup() {
  return 32;
}
MITTENS_INLINE uint thread_execution_width() {
  return 32;
}

}  // namespace attribute

MITTENS_INLINE unsigned lane() {
  return attribute::thread_index_in_simdgroup();
}

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
  const unsigned from = scope == quad_scope ? (lane() & ~3u) + source % 4 : source;
  return by_words(value, [from](int word) { return __nvvm_shfl_sync_idx_i32(all_lanes, word, from, 31); });
}

template <typename T>
MITTENS_INLINE T shuffle_xor(T value, unsigned mask) {
  return by_words(value, [mask](int word) { return __nvvm_shfl_sync_bfly_i32(all_lanes, word, mask, 31); });
}

template <typename F, typename T>
MITTENS_INLINE T reduce(Scope scope, const char*, Site, T value) {
  if constexpr (__is_same(T, int) || __is_same(T, uint)) {
    if (scope == simdgroup_scope && F::has_redux) {
      return F::redux(value);
    }
  }
  for (unsigned step = scope == quad_scope ? 2 : 16; step > 0; step /= 2) {
    value = F::apply(value, shuffle_xor(value, step));
  }
  return value;
}

template <typename F, typename T>
MITTENS_INLINE T prefix(Scope scope, const char*, Site, T value, T first, bool inclusive) {
  const unsigned width = scope == quad_scope ? 4 : 32;
  const unsigned at = lane() % width;
  T sum = value;
  for (unsigned step = 1; step < width; step *= 2) {
    const T below = by_words(sum, [step](int word) { return __nvvm_shfl_sync_up_i32(all_lanes, word, step, 0); });
    sum = at >= step ? F::apply(below, sum) : sum;
  }
  if (inclusive) {
    return sum;
  }
  const T before = by_words(sum, [](int word) { return __nvvm_shfl_sync_up_i32(all_lanes, word, 1, 0); });
  return at == 0 ? first : before;
}

MITTENS_INLINE unsigned ballot(Scope scope, const char*, Site, bool value) {
  const unsigned mask = __nvvm_vote_ballot_sync(all_lanes, value);
  return scope == quad_scope ? mask >> (lane() & ~3u) & 15 : mask;
}

MITTENS_INLINE void barrier(Scope scope, const char*, Site, unsigned) {
  if (scope == threadgroup_scope) {
    __syncthreads();
  } else {
    __nvvm_bar_warp_sync(all_lanes);
  }
}

// From the lane that has this lane's bits where `own` has ones, and those of `source` elsewhere: with a constant source
// no register says where from.
template <unsigned own, typename T>
MITTENS_INLINE T shuffle_beside(T value, unsigned source) {
  return by_words(value,
                  [source](int word) { return __nvvm_shfl_sync_idx_i32(all_lanes, word, source, own << 8 | 31); });
}

// One 8x8 product: each lane brings two elements of a and of b, and leaves with two of a * b + c (see lane_of).
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

// The same in half or bfloat on the tensor cores, whose smallest product takes 16 rows: the lower 8 stay zero. Their
// layout has row l / 4 and columns 2 * (l % 4), + 1 in lane l for a and c, and for b the same of its transposed.
template <typename V>
MITTENS_INLINE float2 tensor_multiply(V a, V b, float2 c, unsigned lane) {
  unsigned left, right;
  __builtin_memcpy(&left, &a, 4);
  __builtin_memcpy(&right, &b, 4);
  const unsigned row = lane / 4;
  const unsigned column = lane % 4 * 2;
  const unsigned from = lane_of(row, column);
  left = shuffle(simdgroup_scope, "", Site{}, left, from);
  const unsigned upper = shuffle(simdgroup_scope, "", Site{}, right, lane_of(column, row));
  const unsigned lower = shuffle(simdgroup_scope, "", Site{}, right, lane_of(column + 1, row));
  const unsigned pair = row % 2 ? upper >> 16 | (lower & 0xffff0000u) : (upper & 0xffffu) | lower << 16;
  const float2 start = shuffle(simdgroup_scope, "", Site{}, c, from);
  float x, y, unused0, unused1;
  if constexpr (__is_same(V, metal::vec<bfloat, 2>)) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
                 : "=f"(x), "=f"(y), "=f"(unused0), "=f"(unused1)
                 : "r"(left), "r"(0), "r"(pair), "f"(start.x), "f"(start.y), "f"(0.0f), "f"(0.0f));
  } else {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
                 : "=f"(x), "=f"(y), "=f"(unused0), "=f"(unused1)
                 : "r"(left), "r"(0), "r"(pair), "f"(start.x), "f"(start.y), "f"(0.0f), "f"(0.0f));
  }
  const unsigned back = row_of(lane) * 4 + column_of(lane) / 2;
  return shuffle(simdgroup_scope, "", Site{}, float2{x, y}, back);
}

MITTENS_INLINE void announce_atomic(const volatile void*, unsigned long, bool, const void*) {}

}  // namespace mittens

#define MITTENS_THREADGROUP_ARRAY(name, ...) \
  using name##_array = __VA_ARGS__;          \
  static __attribute__((address_space(3), loader_uninitialized)) name##_array name
