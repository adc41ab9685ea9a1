#include "ops/recurrence/plan.h"

#include <algorithm>
#include <array>

#include "runtime/gpu.h"

namespace mittens {

namespace {

constexpr int most_uncorrected_steps = 8;  // of the kernel: not measured beside products on an Apple GPU

bool on_apple_gpu(mx::Stream stream) {
  return runs_kernels(stream) && gpu_of(stream).vendor == Gpu::Vendor::apple;
}

}  // namespace

Problem recurrence_problem(const char* op, mx::Dtype dtype, const cpu::Recurrence& sizes) {
  const std::array all = {sizes.batch * sizes.heads, sizes.steps, sizes.rows, sizes.columns};
  std::array<uint32_t, 4> counts;
  std::transform(all.begin(), all.end(), counts.begin(), problem_size);
  return {op, dtype, sizes.gate_per_column, counts};
}

const char* why_mx_gated_delta_update(bool gate_of_head, mx::Stream stream) {
  // MLX's kernels for Apple GPUs multiply chunks of a prompt as matrices.
  return on_apple_gpu(stream) && gate_of_head ? "gates of heads on an Apple GPU, for which MLX has kernels" : nullptr;
}

const char* why_mx_uncorrected(int steps, mx::Stream stream) {
  // Without corrections a chunk of steps is a few products of matrices, where the kernel takes one step at a time. On
  // an H100 it is ahead of them nonetheless, for 4 to 1,024 steps (bench/results/h100.md).
  const bool many = on_apple_gpu(stream) && steps > most_uncorrected_steps;
  return many ? "more than 8 steps on an Apple GPU, which mx multiplies as matrices" : nullptr;
}

}  // namespace mittens
