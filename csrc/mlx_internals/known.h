// The one guard of this folder, which rests on private parts of MLX.
//
// - buffer_ownership: the descriptor of an array, which MLX declares private
// - device_allocator: memory of the GPU in stream order, which MLX's CUDA build exports no function for
// - cuda_encoder: MLX's CUDA command encoder, which it exports but ships no header of
//
// Where the MLX at hand is not the one that they were written for they turn themselves off: caches are copied as MLX
// does, ops keep their own outputs only, and kernels do not run on NVIDIA GPUs.
#pragma once

#include <string_view>

namespace mittens::mlx_internals {

// False also where the environment variable MLX_MITTENS_INTERNALS is "off".
bool is_known();

// Why they are off; empty where they are on.
std::string_view problem();

}  // namespace mittens::mlx_internals
