#include "ops/attention/plan.h"

#include <algorithm>

#include "params/attention.h"
#include "runtime/array_layout.h"
#include "runtime/gpu.h"
#include "runtime/plan_table.h"

namespace mittens {

namespace {

struct AttentionSchedule {
  const char* name;  // of the kernel too
  AttentionKernel kernel;
  Where where;
  uint32_t fewest_queries;
  uint32_t fewest_rows;  // of queries that share keys, of a packed head half of them
  uint32_t longest_window;  // 0: with a window and without
};

// The first that fits is taken. On NVIDIA GPUs simdgroups that share keys win in prompts too, but for short windows of
// many rows: there they would put more together than they add up.
constexpr AttentionSchedule schedules[] = {
    {"prompt16", AttentionKernel::prompt16, Where::nvidia, 17, 0, 1024},
    {"decode16", AttentionKernel::decode16, Where::nvidia, 0, 17, 0},
    {"decode8", AttentionKernel::decode8, Where::nvidia, 0, 0, 0},
    {"prompt", AttentionKernel::prompt, Where::anywhere, 17, 0, 0},
    {"decode", AttentionKernel::decode, Where::anywhere, 0, 0, 0},
};

// Whether there is a kernel that loads ahead.
bool has_ahead(AttentionKernel kernel, const AttentionSizes& sizes, const AttentionOptions& options, mx::Dtype dtype) {
  const bool has_widths =
      sizes.width == sizes.value_width && sizes.width % 32 == 0 && sizes.width >= 64 && sizes.width <= 128;
  const bool has_type = dtype != mx::float32 || (kernel == AttentionKernel::decode8 && options.bits == 0);
  return has_widths && has_type;
}

bool can_run(const AttentionSchedule& schedule, const AttentionSizes& sizes, const AttentionOptions& options,
             mx::Dtype dtype) {
  if (options.is_ragged() && loads_ahead(schedule.kernel)) {
    return false;
  }
  switch (schedule.kernel) {
    case AttentionKernel::decode:
      return true;
    case AttentionKernel::prompt:
      return !options.exact;
    case AttentionKernel::decode8:
      return has_ahead(schedule.kernel, sizes, options, dtype);
    case AttentionKernel::decode16:
    case AttentionKernel::prompt16:
      return !options.exact && has_ahead(schedule.kernel, sizes, options, dtype);
  }
  return false;
}

bool does_pay(const AttentionSchedule& schedule, const AttentionSizes& sizes, const AttentionOptions& options,
              const Gpu& gpu) {
  const uint64_t rows = uint64_t(sizes.ratio()) * sizes.queries;
  const bool enough = sizes.queries >= schedule.fewest_queries && rows * (options.bits ? 2 : 1) >= schedule.fewest_rows;
  if (schedule.longest_window == 0 || !enough) {
    return enough;
  }
  constexpr uint32_t rows_of_threadgroup = 64;
  const uint64_t threadgroups =
      uint64_t(sizes.batches) * sizes.key_heads * ceil_divide(rows, uint64_t(rows_of_threadgroup));
  return options.window > 0 && uint32_t(options.window) <= schedule.longest_window && threadgroups >= gpu.cores / 2;
}

// Registers of the kernels' inner loops, as half registers of Apple's GPUs and as registers of NVIDIA's.
Registers registers_of(const AttentionPlan& plan, const AttentionSizes& sizes, const AttentionOptions& options,
                       bool is_half) {
  const uint32_t columns = sizes.value_width / attention_value_slices(static_cast<int>(sizes.value_width));
  const uint32_t apple = columns <= 64 ? 128 : columns <= 128 ? 160 : columns <= 192 ? 192 : 232;
  uint32_t nvidia = columns <= 64 ? 96 : columns <= 128 ? 128 : 168;
  if (plan.kernel == AttentionKernel::decode8) {
    const uint32_t wide = options.bits != 0 ? 168 : is_half ? 128 : 200;
    nvidia = columns <= 64 ? 128 : wide;
  } else if (plan.kernel == AttentionKernel::decode16) {
    nvidia = 168;
  }
  return {options.bits != 0 ? std::min(apple + 24, 255u) : apple, nvidia};
}

// The first key that any query sees.
uint32_t first_key(const AttentionSizes& sizes, const AttentionOptions& options) {
  if (options.window <= 0 || options.has_mask || options.is_ragged() || sizes.queries > sizes.keys) {
    return 0;
  }
  const int64_t first = int64_t(sizes.keys) - sizes.queries - options.window + 1;
  return static_cast<uint32_t>(std::max<int64_t>(first, 0));
}

// The order in which the keys of a row are summed up depends on this alone if the plan is exact.
constexpr uint32_t exact_keys_per_split = 1024;

// Whether a threadgroup's steps, which each wait for memory, take longer by prediction than to read all keys and values
// and add two shares up. Microseconds of an M1 (bench/results/attention.md).
bool waits_for_memory(const AttentionSizes& sizes, uint32_t keys, uint32_t steps, uint32_t step, bool is_half,
                      const Gpu& gpu) {
  constexpr double us_of_step = 0.6, us_of_block = 0.6, us_of_second_kernel = 10;
  const double blocks = step / (kDecodeSimdgroups * kKeyRows);
  const double columns = double(sizes.batches) * sizes.key_heads * (sizes.width + sizes.value_width);
  const double bytes = columns * keys * (is_half ? 2 : 4);
  return steps * (us_of_step + us_of_block * blocks) > bytes / (gpu.bandwidth_gbps * 1e3) + us_of_second_kernel;
}

// step: keys that a threadgroup takes at once.
void share_out_keys(AttentionPlan& plan, const AttentionSizes& sizes, const AttentionOptions& options, uint32_t step,
                    bool is_half, const Gpu& gpu) {
  const uint32_t keys = sizes.keys - plan.first_key;
  if (options.exact) {
    plan.keys_per_split = exact_keys_per_split;
  } else {
    const uint32_t resident_of_core =
        gpu.resident_simdgroups(registers_of(plan, sizes, options, is_half)) / plan.simdgroups;
    // By prediction a quarter of the simdgroups that an Apple GPU holds keep its memory busy, half where they unpack
    // keys; more splits take longer to add up.
    const uint32_t apple = options.bits || options.leaves_parts ? 2 : 4;
    const uint32_t busy = gpu.vendor == Gpu::Vendor::nvidia ? 1 : apple;
    const uint32_t resident_threadgroups = std::max(gpu.cores * resident_of_core / busy, 1u);
    const uint32_t steps = ceil_divide(keys, step);
    const uint64_t groups = uint64_t(sizes.batches) * sizes.key_heads * plan.row_blocks *
                            attention_value_slices(static_cast<int>(sizes.value_width));
    // Steps that take no longer than half of them and a second kernel.
    constexpr uint32_t serial_steps = 8;
    // Where windows of different queries have few keys in common a share of all keys is none of most rows'.
    const bool apart = options.window > 0 && keys > 2 * (uint64_t(options.window) + kQueryRows);
    uint32_t wanted = 1;
    if (steps > serial_steps && !apart) {
      wanted = static_cast<uint32_t>(std::max<uint64_t>(resident_threadgroups / groups, 1));
      const bool has_room = gpu.vendor == Gpu::Vendor::apple && options.bits == 0 && resident_threadgroups > groups &&
                            resident_threadgroups % groups != 0;
      wanted += has_room && waits_for_memory(sizes, keys, ceil_divide(steps, wanted), step, is_half, gpu);
    }
    if (options.is_ragged() && wanted == 1) {
      // Lengths are not known here: one long row among short ones would keep a few cores busy after all others.
      wanted = std::clamp(steps / (2 * serial_steps), 1u, 4u);
    }
    wanted = std::max(wanted, options.leaves_parts ? 2u : 1u);
    // Putting many shares together takes longer than some steps.
    const uint32_t splits = std::clamp(wanted, 1u, std::max({steps / 4, std::min(steps, 32u), 1u}));
    plan.keys_per_split = ceil_divide(std::max(steps, 1u), splits) * step;
  }
  plan.splits = std::max(ceil_divide(keys, plan.keys_per_split), options.leaves_parts ? 2u : 1u);
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

// Whether mx adds up one row of float32 faster than matrices of 8 rows do, each a sum of three products there.
bool one_row_wins(const AttentionSizes& sizes, mx::Dtype dtype, uint32_t keys) {
  return dtype == mx::float32 && sizes.ratio() * sizes.queries == 1 && sizes.width <= 64 && keys >= 2048;
}

// Whether packed keys and values are unpacked for mx's kernels: from the number of queries at which these win where
// nothing is packed.
bool unpacks_first(const AttentionSizes& sizes, mx::Dtype dtype, const Gpu& gpu) {
  return gpu.vendor == Gpu::Vendor::nvidia && dtype != mx::float32 && sizes.queries > 32;
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
  const auto has_kernel = [&](const AttentionSchedule& schedule) {
    return is_here(schedule.where, gpu) && can_run(schedule, sizes, options, dtype);
  };
  const auto pays = [&](const AttentionSchedule& schedule) { return does_pay(schedule, sizes, options, gpu); };
  AttentionPlan plan{};
  const AttentionSchedule& schedule = choose_row(schedules, choice.schedule, has_kernel, pays);
  plan.kernel = schedule.kernel;
  plan.name = schedule.name;
  const bool decodes = shares_keys(plan.kernel);
  plan.simdgroups = decodes ? kDecodeSimdgroups : attention_prompt_simdgroups(static_cast<int>(sizes.width));
  const uint32_t blocks =
      loads_ahead(plan.kernel)
          ? attention_key_blocks_ahead
          : static_cast<uint32_t>(attention_key_blocks(static_cast<int>(sizes.value_width), dtype == mx::float16));
  const uint32_t step = (decodes ? plan.simdgroups : 1) * kKeyRows * blocks;
  // Exact shares of the keys are counted from the first of all, not from the first that a window shows.
  plan.first_key = options.exact ? 0 : first_key(sizes, options) / step * step;
  plan.row_blocks = ceil_divide(sizes.ratio() * sizes.queries,
                                kQueryRows * row_blocks_of(plan.kernel) * (decodes ? 1 : plan.simdgroups));
  plan.splits = 1;
  plan.keys_per_split = sizes.keys;
  if (decodes || options.leaves_parts) {
    share_out_keys(plan, sizes, options, step, dtype != mx::float32, gpu);
  }
  if (options.is_ragged() && !options.exact) {
    plan.keys_per_split = 0;  // the kernel shares out each row's keys
  }
  return plan;
}

uint32_t combine_simdgroups(const AttentionSizes& sizes, uint32_t parts, const AttentionOptions& options,
                            mx::Stream stream) {
  // One takes 16 parts at once. Narrow rows have few threadgroups for their columns: eight are faster then. The order
  // of an exact sum must not depend on how many parts there are.
  const uint32_t few = options.leaves_parts || sizes.value_width >= 128 ? 32 : 15;
  const bool is_tried = options.leaves_parts || gpu_of(stream).vendor == Gpu::Vendor::apple;
  return is_tried && (options.exact || parts <= few) ? 1 : kCombineSimdgroups;
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

bool unpacks_first(const AttentionSizes& sizes, const AttentionOptions& options, mx::Dtype dtype, mx::Stream stream) {
  return (options.bits == 4 || options.bits == 8) && runs_kernels(stream) &&
         unpacks_first(sizes, dtype, gpu_of(stream));
}

const char* why_mx_attention(const AttentionSizes& sizes, const AttentionOptions& options, mx::Dtype dtype,
                             mx::Stream stream) {
  // mx makes a mask of all scores for a window.
  if (!runs_kernels(stream)) {
    return nullptr;
  }
  const bool is_short = options.window > 0 && int64_t(options.window) * 4 <= sizes.keys;
  const Gpu& gpu = gpu_of(stream);
  if (is_short || (options.bits != 0 && !unpacks_first(sizes, dtype, gpu))) {
    return nullptr;
  }
  if (gpu.vendor == Gpu::Vendor::nvidia) {
    if (options.bits == 0 && !options.has_sinks && one_row_wins(sizes, dtype, sizes.keys - first_key(sizes, options))) {
      return "one row of float32 where matrices are of 8 rows";
    }
    return tensor_cores_win(sizes, dtype, options) ? "many queries where there are tensor cores" : nullptr;
  }
  const bool wins = matrix_units_win(sizes) && mlx_uses_matrix_units(gpu, dtype);
  return wins ? "many queries where there are matrix units" : nullptr;
}

}  // namespace mittens
