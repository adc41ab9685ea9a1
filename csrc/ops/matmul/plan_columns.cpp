// Plans of products with weights [columns, outputs], dense or quantized.
#include "ops/matmul/plan_parts.h"

#include <algorithm>
#include <bit>

#include "params/matmul.h"
#include "runtime/array_layout.h"

namespace mittens {

namespace {

uint32_t lanes_along(uint32_t outputs, uint32_t owned) {
  return std::min(std::bit_ceil(std::max(ceil_divide(outputs, owned), 1u)), 32u);
}

}  // namespace

ColumnsPlan plan_columns(const Problem& problem, const ProductSizes& sizes, const ColumnsKernels& kernels,
                         uint32_t most_splits, mx::Stream stream) {
  constexpr uint32_t fewest_steps = 4;  // rows of weights for each worker of a split
  const Gpu gpu = gpu_of(stream).with_parallelism(calibrated(problem, stream).parallelism);
  ColumnsPlan plan;
  plan.rows = std::min(std::bit_ceil(std::max(sizes.rows, 1u)), kernels.most_rows);
  plan.row_blocks = ceil_divide(sizes.rows, plan.rows);
  plan.lanes = lanes_along(sizes.outputs, kernels.owned);
  plan.tiles = ceil_divide(sizes.outputs, plan.lanes * kernels.owned);
  plan.threads = 32 * kOutputSimdgroups;

  const uint32_t lanes = lanes_along(sizes.outputs, kernels.most_owned);
  const uint64_t threadgroups =
      uint64_t(ceil_divide(sizes.outputs, lanes * kernels.most_owned)) * plan.row_blocks * sizes.matrices;
  const uint32_t worthwhile = sizes.columns / (kOutputSimdgroups * (32 / lanes) * fewest_steps);
  const uint32_t wanted = ceil_divide(wanted_simdgroups(gpu) / kOutputSimdgroups, std::max<uint64_t>(threadgroups, 1));
  const uint32_t splits = std::clamp(worthwhile, 1u, std::min(std::max(wanted, 1u), most_splits));
  plan.columns_per_split = ceil_divide(std::max(sizes.columns, 1u), splits);
  plan.splits = ceil_divide(std::max(sizes.columns, 1u), plan.columns_per_split);
  return plan;
}

QvmPlan plan_qvm(const Problem& problem, const QuantizedFormat& format, const ProductSizes& sizes, uint32_t most_splits,
                 mx::Stream stream) {
  QvmPlan plan{};
  const bool is_nvidia = gpu_of(stream).vendor == Gpu::Vendor::nvidia;
  if (is_nvidia && has_affine_kernels(format)) {
    plan.kernel = QvmKernel::columns;
    plan.columns = plan_columns(problem, sizes, {kOwnedOutputs, kOwnedOutputs, kMatrixRows}, most_splits, stream);
    static_cast<Splits&>(plan) = plan.columns;
    return plan;
  }
  if (!is_nvidia && sizes.rows > most_gemv_rows) {
    plan.kernel = QvmKernel::qvm_tiles;
    plan.by_tiles = plan_tiles(quantized_tiles(format, 1), sizes);
    plan.splits = 1;
    plan.columns_per_split = sizes.columns;
    return plan;
  }
  plan.kernel = QvmKernel::qvm;
  constexpr uint32_t step = kTransposedStep;
  constexpr uint32_t most_blocks = 4;  // of 4 bits, a line of memory
  constexpr uint32_t fewest_steps = 4;  // of a simdgroup
  const Gpu gpu = gpu_of(stream).with_parallelism(calibrated(problem, stream).parallelism);
  const uint32_t output_blocks = ceil_divide(std::max(sizes.outputs, 1u), uint32_t(kTransposedOutputs));
  const uint32_t steps = ceil_divide(std::max(sizes.columns, 1u), step);
  plan.row_blocks = ceil_divide(sizes.rows, uint32_t(kMatrixRows));
  plan.blocks = std::min(output_blocks, most_blocks);
  plan.output_groups = ceil_divide(output_blocks, plan.blocks);
  plan.sharers = std::min(kProductSimdgroups / plan.blocks, steps);
  const uint64_t simdgroups =
      uint64_t(plan.output_groups) * plan.blocks * plan.sharers * std::max(plan.row_blocks, 1u) * sizes.matrices;
  const uint64_t resident_simdgroups = uint64_t(gpu.cores) * gpu.resident_simdgroups(matrices_registers);
  const uint32_t wanted = ceil_divide(resident_simdgroups, std::max(simdgroups, uint64_t(1)));
  const uint32_t worthwhile = std::max(steps / (plan.sharers * fewest_steps), 1u);
  const uint32_t steps_per_split = ceil_divide(steps, std::min({wanted, worthwhile, most_splits}));
  plan.columns_per_split = steps_per_split * step;
  plan.splits = ceil_divide(steps, steps_per_split);
  return plan;
}

}  // namespace mittens
