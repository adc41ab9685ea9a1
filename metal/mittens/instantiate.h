// Names of template instantiations of kernels, by which the host finds them, how many threads these may have, and which
// GPUs they are compiled for.
#pragma once

namespace mittens {

#ifdef MITTENS_NVIDIA
constant constexpr bool is_nvidia = true;
#else
constant constexpr bool is_nvidia = false;
#endif

}  // namespace mittens

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
