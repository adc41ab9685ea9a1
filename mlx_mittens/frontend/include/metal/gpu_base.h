// Basis of GPU targets: kinds of operations between threads, and attributes that follow from the target's own.
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

namespace attribute {

// The target defines these.
MITTENS_INLINE uint3 threads_per_threadgroup();
MITTENS_INLINE uint thread_index_in_threadgroup();
MITTENS_INLINE uint thread_index_in_simdgroup();

MITTENS_INLINE uint3 dispatch_threads_per_threadgroup() {
  return threads_per_threadgroup();
}
MITTENS_INLINE uint3 grid_origin() {
  return uint3{0, 0, 0};
}
MITTENS_INLINE uint simdgroups_per_threadgroup() {
  const uint3 threads = threads_per_threadgroup();
  return (threads.x * threads.y * threads.z + 31) / 32;
}
MITTENS_INLINE uint thread_index_in_quadgroup() {
  return thread_index_in_simdgroup() % 4;
}
MITTENS_INLINE uint quadgroup_index_in_threadgroup() {
  return thread_index_in_threadgroup() / 4;
}
MITTENS_INLINE uint quadgroups_per_threadgroup() {
  const uint3 threads = threads_per_threadgroup();
  return (threads.x * threads.y * threads.z + 3) / 4;
}
MITTENS_INLINE uint dispatch_simdgroups_per_threadgroup() {
  return simdgroups_per_threadgroup();
}
MITTENS_INLINE uint dispatch_quadgroups_per_threadgroup() {
  return quadgroups_per_threadgroup();
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

}  // namespace mittens

#define MITTENS_THREADGROUP_ARRAY(name, ...) \
  using name##_array = __VA_ARGS__;          \
  static __attribute__((address_space(3), loader_uninitialized)) name##_array name
