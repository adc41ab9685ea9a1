#include "ops/attention/plan.h"

#include <algorithm>

#include "params/attention.h"
#include "runtime/array_layout.h"
#include "runtime/gpu.h"
#include "runtime/plan_table.h"

namespace mittens {

namespace {

struct AttentionSchedule {
  const char* name;
  AttentionKernel kernel;
  uint32_t fewest_queries;
};

// The first that fits is taken.
constexpr AttentionSchedule schedules[] = {
    {"prompt", AttentionKernel::prompt, 17},
    {"decode", AttentionKernel::decode, 0},
};

// Registers of the kernels' inner loops, as half registers of Apple's GPUs and as registers of NVIDIA's.
Registers registers_of(const AttentionSizes& sizes, const AttentionOptions& options) {
  const uint32_t columns = sizes.value_width / attention_value_slices(static_cast<int>(sizes.value_width));
  const uint32_t apple = columns <= 64 ? 128 : columns <= 128 ? 160 : columns <= 192 ? 192 : 232;
  return {options.bits != 0 ? std::min(apple + 24, 255u) : apple, columns <= 64 ? 96u : columns <= 128 ? 128u : 168u};
}

// The first key that any query sees.
uint32_t first_key(const AttentionSizes& sizes, const AttentionOptions& options) {
  if (options.window <= 0 || options.has_mask || sizes.queries > sizes.keys) {
    return 0;
  }
  const int64_t first = int64_t(sizes.keys) - sizes.queries - options.window + 1;
  return static_cast<uint32_t>(std::max<int64_t>(first, 0));
}

// The order in which the keys of a row are summed up depends on this alone if the plan is exact.
constexpr uint32_t exact_keys_per_split = 1024;

// step: keys that a threadgroup takes at once.
void share_out_keys(AttentionPlan& plan, const AttentionSizes& sizes, const AttentionOptions& options, uint32_t step,
                    const Gpu& gpu) {
  const uint32_t keys = sizes.keys - plan.first_key;
  if (options.exact) {
    plan.keys_per_split = exact_keys_per_split;
  } else {
    const uint32_t resident_of_core = gpu.resident_simdgroups(registers_of(sizes, options)) / plan.simdgroups;
    // By prediction a quarter of what an Apple GPU holds keeps its memory busy, and half of it where packed keys are to
    // be unpacked; more splits take longer to add up.
    const uint32_t apple = options.bits ? 2 : 4;
    const uint32_t busy = gpu.vendor == Gpu::Vendor::nvidia ? 1 : apple;
    const uint32_t resident_threadgroups = std::max(gpu.cores * resident_of_core / busy, 1u);
    const uint32_t steps = ceil_divide(keys, step);
    const uint64_t groups = uint64_t(sizes.batches) * sizes.key_heads * plan.row_blocks *
                            attention_value_slices(static_cast<int>(sizes.value_width));
    // Steps that take no longer than half of them and a second kernel.
    constexpr uint32_t serial_steps = 8;
    const uint32_t wanted = steps > serial_steps ? static_cast<uint32_t>(resident_threadgroups / groups) : 1;
    // Putting many shares together takes longer than some steps.
    const uint32_t splits = std::clamp(wanted, 1u, std::max({steps / 4, std::min(steps, 32u), 1u}));
    plan.keys_per_split = ceil_divide(std::max(steps, 1u), splits) * step;
  }
  plan.splits = std::max(ceil_divide(keys, plan.keys_per_split), 1u);
}

const Schedules registered({"scaled_dot_product_attention", "quantized_scaled_dot_product_attention"}, schedules);

// From how many rows of queries on mx is faster where there are tensor cores: it has kernels of cuDNN's for them in
// half types, and in float32 composes attention of products in TF32.
bool tensor_cores_win(const AttentionSizes& sizes, mx::Dtype dtype, const AttentionOptions& options) {
  if (dtype == mx::float32) {
    const bool only_causal = options.causal && !options.has_mask && sizes.width <= 64;
    return sizes.queries > 128 && !only_causal;
  }
  return sizes.queries > 32 || (sizes.queries > 16 && sizes.keys < 1024);
}

// The same of an Apple GPU's matrix units, which mx's kernels for heads of 72 and 80 do not use. For up to 16 queries
// ours may divide the keys among threadgroups, mx's do not.
bool matrix_units_win(const AttentionSizes& sizes) {
  return sizes.queries > 16 && sizes.width != 72 && sizes.width != 80;
}

}  // namespace

AttentionSizes attention_sizes(const mx::Shape& queries, const mx::Shape& keys, const mx::Shape& values) {
  const auto size = [](int n) { return static_cast<uint32_t>(n); };
  return {size(queries[0]), size(queries[1]), size(keys[1]),  size(queries[2]),
          size(keys[2]),    size(queries[3]), size(values[3])};
}

Problem attention_problem(const char* op, const AttentionSizes& sizes, const AttentionOptions& options,
                          mx::Dtype dtype) {
  const uint32_t format = sizes.width | options.bits << 9 | options.group_size << 13 | options.causal << 21 |
                          options.has_mask << 22 | (options.window > 0) << 23;
  return {op, dtype, format, {sizes.batches * sizes.key_heads, sizes.ratio(), sizes.queries, sizes.keys}};
}

AttentionPlan plan_attention(const AttentionSizes& sizes, const AttentionOptions& options, mx::Dtype dtype,
                             mx::Stream stream) {
  const char* op = options.bits ? "quantized_scaled_dot_product_attention" : "scaled_dot_product_attention";
  const Choice choice = calibrated(attention_problem(op, sizes, options, dtype), stream);
  const Gpu gpu = gpu_of(stream).with_parallelism(choice.parallelism);
  const auto can_run = [&](const AttentionSchedule& schedule) {
    return !options.exact || schedule.kernel == AttentionKernel::decode;
  };
  const auto pays = [&](const AttentionSchedule& schedule) { return sizes.queries >= schedule.fewest_queries; };
  AttentionPlan plan{};
  plan.kernel = choose_row(schedules, choice.schedule, can_run, pays).kernel;
  const bool decodes = plan.kernel == AttentionKernel::decode;
  plan.simdgroups = decodes ? kDecodeSimdgroups : attention_prompt_simdgroups(static_cast<int>(sizes.width));
  const uint32_t step = (decodes ? plan.simdgroups : 1) * kKeyRows *
                        attention_key_blocks(static_cast<int>(sizes.value_width), dtype == mx::float16);
  // Exact shares of the keys are counted from the first of all, not from the first that a window shows.
  plan.first_key = options.exact ? 0 : first_key(sizes, options) / step * step;
  plan.row_blocks = ceil_divide(sizes.ratio() * sizes.queries, kQueryRows * (decodes ? 1 : plan.simdgroups));
  plan.splits = 1;
  plan.keys_per_split = sizes.keys;
  if (decodes) {
    share_out_keys(plan, sizes, options, step, gpu);
  }
  return plan;
}

const char* why_not_launched(const AttentionSizes& sizes, size_t mask_elements, mx::Stream stream) {
  constexpr uint64_t most_groups = 65535;  // of CUDA's grids along their last two axes
  const uint32_t heads = mask_elements > 0 ? sizes.heads : sizes.key_heads;  // a mask's gradient is by heads
  if (!runs_kernels(stream)) {
    return nullptr;
  }
  if (mask_elements > most_mask_elements) {
    return "a mask of 2**32 elements or more";
  }
  const bool many = uint64_t(sizes.batches) * heads > most_groups;
  return many && gpu_of(stream).vendor == Gpu::Vendor::nvidia ? "more than 65535 heads of all sequences" : nullptr;
}

const char* why_mx_attention(const AttentionSizes& sizes, const AttentionOptions& options, mx::Dtype dtype,
                             mx::Stream stream) {
  // mx makes a mask of all scores for a window.
  if (!runs_kernels(stream)) {
    return nullptr;
  }
  const bool is_short = options.window > 0 && int64_t(options.window) * 4 <= sizes.keys;
  if (is_short || options.bits != 0) {
    return nullptr;
  }
  const Gpu& gpu = gpu_of(stream);
  if (gpu.vendor == Gpu::Vendor::nvidia) {
    return tensor_cores_win(sizes, dtype, options) ? "many queries where there are tensor cores" : nullptr;
  }
  const bool wins = matrix_units_win(sizes) && mlx_uses_matrix_units(gpu, dtype);
  return wins ? "many queries where there are matrix units" : nullptr;
}

}  // namespace mittens
