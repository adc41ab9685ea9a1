#include "ops/norm/row_plan.h"

#include <stdexcept>

#include "mlx/utils.h"

namespace mittens {

namespace {

constexpr uint32_t simdgroup = 32;
// In a threadgroup of the simd kernels, which do not need each other: few, so that small work spreads over the GPU.
constexpr uint32_t most_simdgroups = 4;
// What a split aims at: enough threadgroups to fill a large GPU, none with less than its threads hold at once.
constexpr uint32_t split_threadgroups = 1024;
constexpr uint32_t most_splits = 64;

// Single elements at the ends of a row, at most; each needs a thread of the row (metal/mittens/row_io.h).
uint32_t most_edges(uint32_t columns, uint32_t pack) {
  return columns % pack == 0 ? pack : std::min(columns, 2 * pack - 2);
}

const RowVariant& choose(uint32_t rows, uint32_t packs, uint32_t edges, bool may_split, uint32_t held) {
  for (const auto& variant : row_variants) {
    if (packs <= variant.most_packs && rows <= variant.most_rows && edges <= variant.lanes && variant.packs <= held &&
        (may_split || variant.kernel != RowKernel::split)) {
      return variant;
    }
  }
  throw std::logic_error("[mlx_mittens] the table of row kernels does not end with one that fits all");
}

}  // namespace

RowPlan plan_rows(const mx::array& x, bool may_split, uint32_t held) {
  const uint32_t columns = x.shape(-1);
  const size_t total_rows = columns == 0 ? 0 : x.size() / columns;
  if (total_rows > std::numeric_limits<uint32_t>::max()) {
    throw std::invalid_argument("[mlx_mittens] an array of " + std::to_string(total_rows) +
                                " rows: expected fewer than 2^32");
  }
  const uint32_t rows = static_cast<uint32_t>(total_rows);
  const uint32_t pack = 16 / x.itemsize();
  const uint32_t packs = ceil_divide(columns, pack);
  const RowVariant& variant = choose(rows, packs, most_edges(columns, pack), may_split, held);

  RowPlan plan{variant.kernel, variant.name, {rows, columns, 1, packs, 0}, variant.lanes, rows};
  switch (variant.kernel) {
    case RowKernel::simd: {
      const uint32_t simdgroups = ceil_divide(rows, simdgroup / variant.lanes * variant.rows);
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
      const uint32_t wanted = std::clamp(split_threadgroups / std::max(rows, 1u), 2u, most_splits);
      const uint32_t splits = std::min(wanted, ceil_divide(packs, variant.lanes * variant.packs));
      plan.params.packs_per_split = ceil_divide(ceil_divide(packs, splits), simdgroup) * simdgroup;
      plan.params.splits = ceil_divide(packs, plan.params.packs_per_split);
      plan.threadgroups = rows * plan.params.splits;
      break;
    }
  }
  return plan;
}

mx::Shape workspace_shape(const mx::array& x, int each) {
  const RowPlan plan = plan_rows(x, true);
  if (plan.kernel != RowKernel::split) {
    return {0};
  }
  return {static_cast<int>(plan.params.rows), static_cast<int>(plan.params.splits), each};
}

Launch row_launch(Name file, const char* op, const char* variant, const RowPlan& plan, mx::Dtype dtype) {
  Launch launch;
  launch.file = file;
  launch.kernel = kernel_name(dtype, op, variant);
  launch.threadgroups = {plan.threadgroups, 1, 1};
  launch.threads = {plan.threads, 1, 1};
  return launch;
}

}  // namespace mittens
