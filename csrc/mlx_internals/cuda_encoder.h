// The few members that we need of MLX's CUDA command encoder, and its buffers' memory: MLX ships no header of them. The
// symbols are weak: in an MLX without CUDA they are null.
#pragma once

#include <cstdint>
#include <functional>

#include "mlx/array.h"
#include "mlx/stream.h"
#include "mlx/version.h"

struct CUfunc_st;
struct dim3 {
  unsigned int x, y, z;
};

namespace mlx::core::cu {

class __attribute__((visibility("default"))) CommandEncoder {
 public:
  __attribute__((weak)) void set_input_array(const array& input);
  __attribute__((weak)) void set_output_array(const array& output);
  __attribute__((weak)) void add_completed_handler(std::function<void()> task);
  __attribute__((weak)) void add_kernel_node_raw(CUfunc_st* function, dim3 grid, dim3 block, dim3 cluster,
                                                 uint32_t shared_bytes, void** arguments);
};

__attribute__((weak)) CommandEncoder& get_command_encoder(Stream stream);

}  // namespace mlx::core::cu

namespace mittens::mlx_internals {

// The object behind an array's buffer in MLX's CUDA build.
struct CudaBuffer {
  void* data;
  size_t size;
  int device;
};

// Whether these are the encoder, the buffers and the allocator of this release: it is mlx 0.32.4.
constexpr bool kCudaIsKnown = MLX_VERSION_NUMERIC == 32004;

inline bool has_cuda_encoder() {
  return &mlx::core::cu::get_command_encoder != nullptr;
}

}  // namespace mittens::mlx_internals
