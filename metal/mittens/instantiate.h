// Names of template instantiations of kernels, by which the host finds them, how many threads these may have, and which
// GPUs they are compiled for; and the parameters by which a kernel knows where a thread is.
#pragma once

namespace mittens {

#ifdef MITTENS_NVIDIA
constant constexpr bool is_nvidia = true;
#else
constant constexpr bool is_nvidia = false;
#endif

}  // namespace mittens

// Threads of a threadgroup of two dimensions.
#define thread_of_plane                               \
  uint3 group [[threadgroup_position_in_grid]],       \
  uint3 thread_at [[thread_position_in_threadgroup]], \
  uint3 threads [[threads_per_threadgroup]],          \
  uint lane [[thread_index_in_simdgroup]]

// Threads of simdgroups in a row.
#define thread_of_simdgroups                              \
  uint3 group [[threadgroup_position_in_grid]],           \
  uint t [[thread_index_in_threadgroup]],                 \
  uint lane [[thread_index_in_simdgroup]],                \
  uint simdgroup [[simdgroup_index_in_threadgroup]],      \
  uint simdgroups [[simdgroups_per_threadgroup]]

// Lanes of simdgroups that each have work of their own.
#define lane_of_simdgroup                       \
  uint3 group [[threadgroup_position_in_grid]], \
  uint lane [[thread_index_in_simdgroup]],      \
  uint simdgroup [[simdgroup_index_in_threadgroup]]

// An attribute of kernels: a threadgroup has at most `launched` threads. Apple's compiler takes registers from a thread
// where more than 256 are declared. NVIDIA's allots them by `nvidia`, which leaves more threads room on a core.
#define threads_at_most(launched, nvidia) \
  max_total_threads_per_threadgroup(mittens::is_nvidia ? int(nvidia) : int(launched))

#define instantiate_kernel(name, function, ...) \
  template [[host_name(name)]] [[kernel]] decltype(function<__VA_ARGS__>) function<__VA_ARGS__>;

// One instantiation for each element type, called <name>_<dtype>; the type is the first template argument, or the only
// one.
#define instantiate_types(name, function, ...)                        \
  instantiate_kernel(name "_float32", function, float, ##__VA_ARGS__) \
  instantiate_kernel(name "_float16", function, half, ##__VA_ARGS__)  \
  instantiate_kernel(name "_bfloat16", function, bfloat, ##__VA_ARGS__)
