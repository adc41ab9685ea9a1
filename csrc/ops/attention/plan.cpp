#include "ops/attention/plan.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "params/attention.h"
#include "runtime/array_layout.h"
#include "runtime/gpu.h"
#include "runtime/plan_table.h"

namespace mittens {

namespace {

constexpr uint32_t most_decode_queries = 16;
constexpr uint32_t many = std::numeric_limits<uint32_t>::max();

enum class Storage { dense, packed, either };  // of keys and values
enum class Type { half, float32, either };
enum class Queries { few, prompt, either };

struct AttentionSchedule {
  const char* name;
  AttentionKernel kernel;
  Where where;
  Storage storage;
  Type type;
  Queries queries;
  uint32_t fewest_width;
  uint32_t most_width;
  // Rows of queries that share keys.
  uint32_t fewest_rows;
  uint32_t most_rows;
};

// The first that fits is taken. Matrices of 8 rows: where they are full enough, and for packed keys and values from two
// rows on, since a matrix that is mostly empty takes less than to unpack for each row. In float32 they have 8 rows at
// most, as 16 would take more registers than there are; prompts by them take 0.12 to 0.95 of the time on an H200, while
// on Apple's GPUs the prefill kernel's simdgroups share what they load by a core's cache.
constexpr AttentionSchedule schedules[] = {
    {"mma", AttentionKernel::mma, Where::anywhere, Storage::packed, Type::half, Queries::either, 0, 128, 2, many},
    {"mma", AttentionKernel::mma, Where::anywhere, Storage::dense, Type::half, Queries::few, 0, 128, 3, many},
    {"mma", AttentionKernel::mma, Where::anywhere, Storage::dense, Type::half, Queries::prompt, 64, 64, 3, many},
    {"mma", AttentionKernel::mma, Where::anywhere, Storage::dense, Type::half, Queries::prompt, 128, 128, 3, many},
    {"mma", AttentionKernel::mma, Where::anywhere, Storage::dense, Type::float32, Queries::few, 0, 128, 5, 8},
    {"mma", AttentionKernel::mma, Where::nvidia, Storage::dense, Type::float32, Queries::prompt, 64, 64, 3, many},
    {"mma", AttentionKernel::mma, Where::nvidia, Storage::dense, Type::float32, Queries::prompt, 128, 128, 3, many},
    {"prefill", AttentionKernel::prefill, Where::anywhere, Storage::dense, Type::either, Queries::prompt, 0, 256, 1,
     many},
    {"decode", AttentionKernel::decode, Where::anywhere, Storage::either, Type::either, Queries::either, 0, 256, 1,
     many},
};

bool can_run(const AttentionSchedule& schedule, const AttentionSizes& sizes, const AttentionOptions& options,
             mx::Dtype dtype) {
  const Storage storage = options.bits == 0 ? Storage::dense : Storage::packed;
  const Type type = dtype == mx::float32 ? Type::float32 : Type::half;
  const Queries queries = sizes.is_prompt() ? Queries::prompt : Queries::few;
  return (schedule.storage == Storage::either || schedule.storage == storage) &&
         (schedule.type == Type::either || schedule.type == type) &&
         (schedule.queries == Queries::either || schedule.queries == queries) && sizes.width >= schedule.fewest_width &&
         sizes.width <= schedule.most_width;
}

// Whether metal/attention has a kernel: what matrices are always better at is left to them.
bool has_kernel(AttentionKernel kernel, const AttentionSizes& sizes, const AttentionOptions& options, mx::Dtype dtype) {
  const bool is_half = dtype != mx::float32;
  if (kernel == AttentionKernel::prefill) {
    return !is_half || (sizes.width != 64 && sizes.width != 128);
  }
  if (kernel == AttentionKernel::mma || sizes.width > 128) {
    return true;
  }
  constexpr uint64_t most_rows = 16;
  const uint64_t rows = std::min(std::bit_ceil(uint64_t(sizes.ratio()) * sizes.queries), most_rows);
  if (is_half) {
    return rows <= (options.bits != 0 ? 1 : 2);
  }
  return options.bits != 0 || rows != 8;
}

AttentionKernel choose(const AttentionSizes& sizes, const AttentionOptions& options, mx::Dtype dtype, const Gpu& gpu,
                       const Name& asked_for) {
  const auto has_kernel_for = [&](const AttentionSchedule& schedule) {
    return can_run(schedule, sizes, options, dtype) && has_kernel(schedule.kernel, sizes, options, dtype);
  };
  const auto pays = [&](const AttentionSchedule& schedule) {
    const uint64_t rows = uint64_t(sizes.ratio()) * sizes.queries;
    return is_here(schedule.where, gpu) && rows >= schedule.fewest_rows && rows <= schedule.most_rows;
  };
  return choose_row(schedules, asked_for, has_kernel_for, pays).kernel;
}

Registers registers_of(const AttentionPlan& plan, const AttentionOptions& options, mx::Dtype dtype) {
  if (plan.kernel == AttentionKernel::decode) {
    return {255, plan.rows > 4 ? 255u : 168u};
  }
  if (dtype == mx::float32 || plan.rows > 8) {
    return {255, plan.width == 64 ? 168u : 255u};
  }
  return {255, options.bits == 0 || plan.width == 64 ? 128u : 168u};
}

void share_out_keys(AttentionPlan& plan, const AttentionSizes& sizes, const AttentionOptions& options, mx::Dtype dtype,
                    const Gpu& gpu) {
  const bool by_matrices = plan.kernel == AttentionKernel::mma;
  plan.width = std::max(std::bit_ceil(sizes.width), 64u);
  const uint32_t rows = sizes.ratio() * sizes.queries;
  plan.rows = std::min(std::bit_ceil(rows), plan.width > 128 ? 8u : 16u);
  if (by_matrices) {
    const bool only_eight = dtype == mx::float32 || (options.bits != 0 && options.group_size < 64);
    plan.rows = only_eight ? 8 : std::max(plan.rows, 8u);
  } else if (options.bits != 0 && plan.rows == 2) {
    plan.rows = 4;  // there are fewer kernels of packed keys
  }
  plan.row_blocks = ceil_divide(rows, plan.rows);
  const uint32_t resident_threadgroups =
      gpu.cores * (gpu.resident_simdgroups(registers_of(plan, options, dtype)) / kDecodeSimdgroups);
  uint32_t step = kDecodeSimdgroups * (plan.rows == 1 ? 8 : 4) * (256 / plan.width);  // DecodeShape::tile
  if (by_matrices) {
    const uint32_t elements = plan.width * plan.rows / 8;
    uint32_t tiles = elements > 64 || dtype == mx::float32 ? 1 : 2;  // TileShape::C
    if (options.bits != 0) {
      tiles = options.group_size < 64 || elements > 128 ? 1 : 2;
    }
    step = kDecodeSimdgroups * 8 * tiles;
  }
  const uint32_t first = first_key(sizes, options);
  const uint32_t steps = ceil_divide(sizes.keys - first, step);
  const uint64_t groups = uint64_t(sizes.batches) * sizes.key_heads * plan.row_blocks;
  // Steps that take no longer than half of them and a second kernel.
  const uint32_t serial_steps = by_matrices ? (plan.rows > 8 || options.bits != 0 ? 4 : 8) : plan.rows > 4 ? 2 : 4;
  // Whether a row of a prompt sees any key at all is known where all of them are.
  const bool may_split = steps > serial_steps && !(sizes.is_prompt() && options.has_mask);
  const uint32_t wanted = may_split ? static_cast<uint32_t>(resident_threadgroups / groups) : 1;
  // Putting many shares together takes longer than some steps.
  const uint32_t splits = std::clamp(wanted, 1u, std::max({steps / 4, std::min(steps, 32u), 1u}));
  plan.keys_per_split = ceil_divide(std::max(steps, 1u), splits) * step;
  plan.splits = std::max(ceil_divide(sizes.keys - first, plan.keys_per_split), 1u);
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

bool AttentionSizes::is_prompt() const {
  return queries > most_decode_queries;
}

AttentionSizes attention_sizes(const mx::Shape& queries, const mx::Shape& keys) {
  return {static_cast<uint32_t>(queries[0]), static_cast<uint32_t>(queries[1]), static_cast<uint32_t>(keys[1]),
          static_cast<uint32_t>(queries[2]), static_cast<uint32_t>(keys[2]),    static_cast<uint32_t>(queries[3])};
}

Problem attention_problem(const char* op, const AttentionSizes& sizes, const AttentionOptions& options,
                          mx::Dtype dtype) {
  const uint32_t format = sizes.width | options.bits << 9 | options.group_size << 13 | options.causal << 21 |
                          options.has_mask << 22 | (options.window > 0) << 23;
  return {op, dtype, format, {sizes.batches * sizes.key_heads, sizes.ratio(), sizes.queries, sizes.keys}};
}

uint32_t first_key(const AttentionSizes& sizes, const AttentionOptions& options) {
  if (options.window <= 0 || options.has_mask || sizes.queries > sizes.keys) {
    return 0;
  }
  const int64_t first = int64_t(sizes.keys) - sizes.queries - options.window + 1;
  return static_cast<uint32_t>(std::max<int64_t>(first, 0));
}

AttentionPlan plan_attention(const AttentionSizes& sizes, const AttentionOptions& options, mx::Dtype dtype,
                             mx::Stream stream) {
  const char* op = options.bits ? "quantized_scaled_dot_product_attention" : "scaled_dot_product_attention";
  const Choice choice = calibrated(attention_problem(op, sizes, options, dtype), stream);
  const Gpu gpu = gpu_of(stream).with_parallelism(choice.parallelism);
  AttentionPlan plan{};
  plan.kernel = choose(sizes, options, dtype, gpu, choice.schedule);
  if (plan.kernel == AttentionKernel::prefill) {
    plan.width = sizes.width;
    plan.rows = kPrefillSimdgroups * 8 * (sizes.width == 64 ? 2 : 1);  // R of attention/attention_prefill.metal
    plan.row_blocks = ceil_divide(sizes.queries, plan.rows);
    plan.splits = 1;
    plan.keys_per_split = sizes.keys;
  } else {
    share_out_keys(plan, sizes, options, dtype, gpu);
  }
  return plan;
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
