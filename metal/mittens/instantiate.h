// Naming template instantiations of kernels, so that the host finds them by name.
#pragma once

#define instantiate_kernel(name, function, ...) \
  template [[host_name(name)]] [[kernel]] decltype(function<__VA_ARGS__>) function<__VA_ARGS__>;

// One instantiation for each element type, called <name>_<dtype>; the type is the first template argument.
#define instantiate_types(name, function, ...)                    \
  instantiate_kernel(name "_float32", function, float, __VA_ARGS__) \
  instantiate_kernel(name "_float16", function, half, __VA_ARGS__)  \
  instantiate_kernel(name "_bfloat16", function, bfloat, __VA_ARGS__)
