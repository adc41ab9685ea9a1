#include "ops/recurrence/plan.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "runtime/gpu.h"
#include "runtime/numerics.h"

namespace mittens {

namespace {

constexpr int most_uncorrected_steps = 8;  // of the kernel: not measured beside products on an Apple GPU
constexpr uint32_t most_exact_steps = 16;  // products of more rows are not exact on GPUs

// Whether each of few steps is to have the bits that it has alone, which chunks as matrices do not give.
bool are_few_exact(uint32_t steps) {
  return is_exact() && steps <= most_exact_steps;
}

// Whether MLX 0.32.4 has a Metal kernel; else its op is operations for each step.
bool has_kernel_of_mlx(const cpu::Recurrence& sizes, bool has_mask) {
  constexpr std::pair<size_t, size_t> heads[] = {{16, 16}, {16, 32}, {16, 48}, {16, 64}, {24, 24}, {32, 32}};
  return !has_mask && !sizes.gate_per_column && sizes.rows == 128 && sizes.columns == 128 &&
         std::find(std::begin(heads), std::end(heads), std::pair(sizes.key_heads, sizes.heads)) != std::end(heads);
}

}  // namespace

Problem recurrence_problem(const char* op, mx::Dtype dtype, const cpu::Recurrence& sizes) {
  const std::array all = {sizes.batch * sizes.heads, sizes.steps, sizes.rows, sizes.columns};
  std::array<uint32_t, 4> counts;
  std::transform(all.begin(), all.end(), counts.begin(), problem_size);
  return {op, dtype, sizes.gate_per_column, counts};
}

const char* why_mx_gated_delta_update(GatedDeltaPeer peer, const cpu::Recurrence& sizes, bool has_mask,
                                      mx::Stream stream) {
  if (!runs_apple_kernels(stream) || sizes.gate_per_column) {
    return nullptr;
  }
  if (peer == GatedDeltaPeer::kernel) {
    return "gates of heads on an Apple GPU, for which mlx-lm has kernels";
  }
  // MLX's kernels for Apple GPUs multiply chunks of a prompt as matrices.
  return peer == GatedDeltaPeer::op && has_kernel_of_mlx(sizes, has_mask) && !are_few_exact(sizes.steps)
             ? "gates of heads on an Apple GPU, for which MLX has a kernel"
             : nullptr;
}

const char* why_mx_uncorrected(int steps, mx::Stream stream) {
  // Without corrections a chunk of steps is a few products of matrices, where the kernel takes one step at a time. On
  // an H100 it is ahead of them nonetheless, for 4 to 1,024 steps (bench/results/h100.md).
  const bool many =
      runs_apple_kernels(stream) && steps > most_uncorrected_steps && !are_few_exact(static_cast<uint32_t>(steps));
  return many ? "more than 8 steps on an Apple GPU, which mx multiplies as matrices" : nullptr;
}

}  // namespace mittens
