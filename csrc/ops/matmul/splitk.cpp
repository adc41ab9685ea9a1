#include "ops/matmul/splitk.h"

#include <algorithm>
#include <bit>

#include "params/matmul.h"
#include "runtime/array_layout.h"

namespace mittens {

namespace {

const Name sum_file = "matmul/splitk_reduce.metal";

uint32_t lanes_along(uint32_t outputs, uint32_t owned) {
  return std::min(std::bit_ceil(std::max(ceil_divide(outputs, owned), 1u)), 32u);
}

}  // namespace

ColumnsPlan plan_columns(uint32_t rows, uint32_t columns, uint32_t outputs, uint32_t matrices, uint32_t owned,
                         uint32_t most_owned, uint32_t most_rows, bool may_split) {
  constexpr uint32_t simdgroups = 8;  // output_simdgroups of matmul/outputs.h
  constexpr uint32_t wanted_threadgroups = 512;  // a large GPU several times over
  constexpr uint32_t fewest_steps = 4;  // rows of weights for each worker of a split
  ColumnsPlan plan;
  plan.rows = std::min(std::bit_ceil(std::max(rows, 1u)), most_rows);
  plan.row_blocks = ceil_divide(rows, plan.rows);
  plan.lanes = lanes_along(outputs, owned);
  plan.tiles = ceil_divide(outputs, plan.lanes * owned);
  plan.threads = 32 * simdgroups;

  const uint32_t lanes = lanes_along(outputs, most_owned);
  const uint64_t threadgroups = uint64_t(ceil_divide(outputs, lanes * most_owned)) * plan.row_blocks * matrices;
  const uint32_t most = columns / (simdgroups * (32 / lanes) * fewest_steps);
  const uint32_t wanted = may_split ? ceil_divide(wanted_threadgroups, std::max<uint64_t>(threadgroups, 1)) : 1;
  const uint32_t splits = std::clamp(most, 1u, wanted);
  plan.columns_per_split = ceil_divide(std::max(columns, 1u), splits);
  plan.splits = ceil_divide(std::max(columns, 1u), plan.columns_per_split);
  return plan;
}

mx::Shape workspace_shape(uint32_t splits, uint64_t results) {
  if (splits == 1) {
    return {0};
  }
  return {static_cast<int>(splits), static_cast<int>(results)};
}

Launch split_sum_launch(const mx::array& sums, const mx::array& bias, bool has_bias, mx::array& y, uint32_t splits) {
  constexpr uint32_t threads = 256;
  const uint32_t outputs = y.shape(-1);
  const SplitSumParams params{splits, static_cast<uint32_t>(y.size() / outputs), outputs, has_bias};
  Launch launch;
  launch.file = sum_file;
  launch.kernel = kernel_name(y.dtype(), "split", "sum");
  launch.threadgroups = {ceil_divide(y.size(), threads), 1, 1};
  launch.threads = {threads, 1, 1};
  return launch.input(sums).input_if(has_bias, bias).output(y).params(params);
}

}  // namespace mittens
