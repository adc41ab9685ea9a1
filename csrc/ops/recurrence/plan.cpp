#include "ops/recurrence/plan.h"

#include "runtime/gpu.h"

namespace mittens {

const char* why_mx_gated_delta_update(bool gate_of_head, mx::Stream stream) {
  // MLX's kernels for Apple GPUs multiply chunks of a prompt as matrices.
  const bool wins = runs_kernels(stream) && gpu_of(stream).vendor == Gpu::Vendor::apple && gate_of_head;
  return wins ? "gates of heads on an Apple GPU, for which MLX has kernels" : nullptr;
}

}  // namespace mittens
