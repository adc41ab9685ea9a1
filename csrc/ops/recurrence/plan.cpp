#include "ops/recurrence/plan.h"

#include "runtime/gpu.h"

namespace mittens {

namespace {

constexpr int most_uncorrected_steps = 8;  // of the kernel: not measured beside products on a GPU

}  // namespace

const char* why_mx_gated_delta_update(bool gate_of_head, mx::Stream stream) {
  // MLX's kernels for Apple GPUs multiply chunks of a prompt as matrices.
  const bool wins = runs_kernels(stream) && gpu_of(stream).vendor == Gpu::Vendor::apple && gate_of_head;
  return wins ? "gates of heads on an Apple GPU, for which MLX has kernels" : nullptr;
}

const char* why_mx_uncorrected(int steps, mx::Stream stream) {
  // Without corrections a chunk of steps is a few products of matrices, where the kernel takes one step at a time.
  const bool many = runs_kernels(stream) && steps > most_uncorrected_steps;
  return many ? "more than 8 steps on a GPU, which mx multiplies as matrices" : nullptr;
}

}  // namespace mittens
