#include "ops/matmul/splitk.h"

#include <algorithm>
#include <bit>

#include "params/matmul.h"
#include "runtime/array_layout.h"

namespace mittens {

namespace {

const Name sum_file = "matmul/splitk_reduce.metal";

}  // namespace

mx::Shape workspace_shape(uint32_t splits, uint64_t results) {
  if (splits == 1) {
    return {0};
  }
  return {static_cast<int>(splits), static_cast<int>(results)};
}

uint32_t splits_of_workspace(const std::vector<mx::array>& outputs) {
  return outputs.size() < 2 || outputs[1].size() == 0 ? 1 : outputs[1].shape(0);
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
