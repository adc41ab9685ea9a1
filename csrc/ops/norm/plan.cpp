#include "ops/norm/plan.h"

#include <stdexcept>

#include "mlx/utils.h"

namespace mittens {

namespace {

constexpr uint32_t simdgroup = 32;
// In a threadgroup of the simd kernels, which do not need each other: few, so that small work spreads over the GPU.
constexpr uint32_t most_simdgroups = 4;
// A split aims at enough threadgroups to fill the GPU, none with less than its threads hold at once.
constexpr uint32_t split_threadgroups = 8;  // of a core
constexpr uint32_t most_splits = 64;

// Single elements at the ends of a row, at most; each needs a thread of the row (metal/mittens/row_io.h).
uint32_t most_edges(uint32_t columns, uint32_t pack) {
  return columns % pack == 0 ? pack : std::min(columns, 2 * pack - 2);
}

struct Rows {
  uint32_t rows;
  uint32_t packs;
  uint32_t edges;
};

const RowVariant& choose(const Rows& rows, const Gpu& gpu, const RowPlanOptions& options, const Name& asked_for) {
  const auto can_run = [&](const RowVariant& variant) {
    return rows.packs <= variant.most_packs && rows.edges <= variant.lanes && variant.packs <= options.most_packs &&
           (options.most_splits > 1 || variant.kernel != RowKernel::split);
  };
  const auto pays = [&](const RowVariant& variant) {
    return is_here(variant.where, gpu) && rows.rows <= variant.most_rows * gpu.cores;
  };
  return choose_row(row_variants, asked_for, can_run, pays);
}

// The first that fits is taken; for rows that registers do not hold, the three kernels that read them twice.
constexpr NormVjpVariant norm_vjp_variants[] = {
    {32, 2, NormVjpKernel::simd, "simd1", 1},     {64, 2, NormVjpKernel::simd, "simd2", 2},
    {256, 2, NormVjpKernel::block, "block1", 1},  {1024, 2, NormVjpKernel::block, "block2", 2},
    {2048, 4, NormVjpKernel::block, "block4", 4}, {no_limit, 2, NormVjpKernel::columns, "columns", 1},
};

constexpr uint32_t most_blocks = 512;  // of rows, each with its share of the parameters' gradients
constexpr uint32_t few_threads = 1 << 16;  // in all blocks: fewer, with less to add up, would leave a GPU idle
constexpr uint32_t rows_per_block = 16;  // past that
constexpr uint32_t statistics_packs = 2048;  // of a row, for a threadgroup of the statistics kernel

const Schedules registered({"rms_norm", "layer_norm", "add_rms_norm", "norm_add_norm", "softmax"}, row_variants);

}  // namespace

RowPlan plan_row_op(const mx::array& x, mx::Stream stream, const RowPlanOptions& options) {
  const uint32_t columns = x.shape(-1);
  const size_t total_rows = columns == 0 ? 0 : x.size() / columns;
  if (total_rows > std::numeric_limits<uint32_t>::max()) {
    throw std::invalid_argument("[mlx_mittens] an array of " + std::to_string(total_rows) +
                                " rows: expected fewer than 2^32");
  }
  const uint32_t rows = static_cast<uint32_t>(total_rows);
  const uint32_t pack = 16 / x.itemsize();
  const uint32_t packs = ceil_divide(columns, pack);
  const Choice choice = calibrated(row_problem(options.op, x, x.dtype()), stream);
  const Gpu& gpu = gpu_of(stream);
  const RowVariant& variant = choose({rows, packs, most_edges(columns, pack)}, gpu, options, choice.schedule);

  RowPlan plan{variant.kernel, variant.name, {rows, columns, 1, packs, 0}, variant.lanes, rows};
  switch (variant.kernel) {
    case RowKernel::simd: {
      const uint32_t simdgroups = ceil_divide(rows, simdgroup / variant.lanes);
      const uint32_t together = std::clamp(simdgroups, 1u, most_simdgroups);
      plan.threads = simdgroup * together;
      plan.threadgroups = ceil_divide(simdgroups, together);
      break;
    }
    case RowKernel::block:
    case RowKernel::looped:
      plan.threads = std::min(variant.lanes, ceil_divide(ceil_divide(packs, variant.packs), simdgroup) * simdgroup);
      break;
    case RowKernel::split: {
      const uint32_t threadgroups = split_threadgroups * gpu.with_parallelism(choice.parallelism).cores;
      const uint32_t wanted = std::clamp(threadgroups / std::max(rows, 1u), 2u, most_splits);
      const uint32_t splits =
          std::min({wanted, ceil_divide(packs, variant.lanes * variant.packs), options.most_splits});
      plan.params.packs_per_split = ceil_divide(ceil_divide(packs, splits), simdgroup) * simdgroup;
      plan.params.splits = ceil_divide(packs, plan.params.packs_per_split);
      plan.threadgroups = rows * plan.params.splits;
      break;
    }
  }
  return plan;
}

Problem row_problem(const char* op, const mx::array& x, mx::Dtype dtype) {
  const uint32_t columns = x.shape(-1);
  const size_t rows = columns == 0 ? 0 : x.size() / columns;
  return {op, dtype, 0, {static_cast<uint32_t>(std::min<size_t>(rows, no_limit)), columns, 1, 1}};
}

mx::Shape workspace_shape(const RowPlan& plan, int each) {
  if (plan.kernel != RowKernel::split) {
    return {0};
  }
  return {static_cast<int>(plan.params.rows), static_cast<int>(plan.params.splits), each};
}

uint32_t splits_of_workspace(const mx::array& workspace) {
  return workspace.size() == 0 ? 1 : workspace.shape(1);
}

NormVjpPlan plan_norm_vjp(const mx::array& x, const NormVjpOptions& options) {
  NormVjpPlan plan{};
  plan.columns = x.shape(-1);
  plan.rows = plan.columns == 0 ? 0 : static_cast<uint32_t>(x.size() / plan.columns);
  const uint32_t packs = ceil_divide(plan.columns, 16 / x.itemsize());
  for (const auto& variant : norm_vjp_variants) {
    if (packs <= variant.most_packs && x.itemsize() >= variant.least_itemsize) {
      plan.variant = &variant;
      break;
    }
  }
  const bool sums = options.weight_gradient || options.bias_gradient;
  uint32_t turns = plan.rows;
  plan.threads = simdgroup * norm_vjp_simdgroups;
  if (plan.variant->kernel == NormVjpKernel::simd) {
    turns = ceil_divide(plan.rows, norm_vjp_simdgroups);
  } else if (plan.variant->kernel == NormVjpKernel::block) {
    plan.threads = ceil_divide(ceil_divide(packs, plan.variant->packs), simdgroup) * simdgroup;
  }
  const uint32_t few_blocks = std::min(few_threads / plan.threads, most_blocks);
  plan.blocks = sums ? std::min(turns, std::clamp(turns / rows_per_block, few_blocks, most_blocks)) : turns;
  const uint32_t splits = ceil_divide(packs, statistics_packs);
  plan.packs_per_split = ceil_divide(packs, std::max(splits, 1u));
  plan.splits = ceil_divide(packs, std::max(plan.packs_per_split, 1u));
  return plan;
}

Launch row_launch(Name file, const char* op, const char* kind, const char* variant, const RowPlan& plan,
                  mx::Dtype dtype) {
  Launch launch;
  launch.file = file;
  launch.kernel = kernel_name(dtype, op, kind, variant);
  launch.threadgroups = {plan.threadgroups, 1, 1};
  launch.threads = {plan.threads, 1, 1};
  return launch;
}

}  // namespace mittens
