#include "ops/recurrence/token_layer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "mlx/ops.h"
#include "ops/recurrence/recurrence.h"
#include "ops/recurrence/state_params.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/ready_inputs.h"
#include "runtime/gpu.h"

namespace mittens {

void check_shape(const char* op, const char* name, const mx::array& array, const mx::Shape& shape) {
  if (array.shape() != shape) {
    checks::fail(op, name, " has shape ", array.shape(), ": expected ", shape);
  }
}

mx::array taps_of_channels(const char* op, const mx::array& conv_weight, std::optional<int> channels, mx::Stream stream,
                           const char* name) {
  const bool has_one = conv_weight.ndim() == 3 && conv_weight.shape(2) == 1;
  if ((conv_weight.ndim() != 2 && !has_one) || conv_weight.shape(1) < 1 ||
      conv_weight.shape(0) != channels.value_or(conv_weight.shape(0))) {
    const std::string expected = channels ? std::to_string(*channels) : "channels";
    checks::fail(op, name, " has shape ", conv_weight.shape(), ": expected [", expected, ", taps] or [", expected,
                 ", taps, 1]");
  }
  return has_one ? mx::squeeze(conv_weight, 2, stream) : conv_weight;
}

bool token_goes_to_mx(const char* op, mx::Dtype dtype, const cpu::Recurrence& sizes, bool is_empty, mx::Stream stream) {
  if (runs_kernels(stream) && sizes.rows > kMostTokenRows) {
    fallback(op, "more than " + std::to_string(kMostTokenRows) + " rows");
    return true;
  }
  return is_empty || goes_to_mx(op, dtype, sizes, nullptr, stream);
}

StateParams token_params(const cpu::Recurrence& sizes) {
  const auto count = [](size_t n) { return static_cast<uint32_t>(n); };
  return {.steps = 1,
          .heads = count(sizes.heads),
          .key_heads = count(sizes.key_heads),
          .rows = count(sizes.rows),
          .columns = count(sizes.columns),
          .lanes = lanes_of_row(count(sizes.columns)),
          .packs = sizes.columns % 8 == 0,
          .has_state = 1,
          .has_mask = 0};
}

void share_out_heads(Launch& launch, const StateParams& params, size_t batch) {
  const uint32_t simdgroups = ceil_divide(params.rows, 32 / params.lanes);
  launch.threadgroups = {static_cast<uint32_t>(batch) * params.heads, 1, 1};
  launch.threads = {32 * std::min<uint32_t>(kTokenSimdgroups, simdgroups), 1, 1};
}

cpu::Numbers native_numbers(const mx::array& array) {
  return {data_of(array), native_type(array.dtype())};
}

Arrays results_of(std::shared_ptr<KernelPrimitive> primitive, Arrays inputs, const std::vector<mx::Dtype>& dtypes) {
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  return mx::array::make_arrays(std::move(shapes), dtypes, std::move(primitive), std::move(inputs));
}

bool HeadsOfToken::is_ready(const Arrays& inputs, size_t i) const {
  return is_row_contiguous(inputs[i], i == state_ ? 16 : 1);
}

const Arrays& HeadsOfToken::prepared(const Arrays& inputs, Arrays& copies) {
  return ready_inputs(inputs, stream(), copies, [&](size_t i) { return is_ready(inputs, i); });
}

// Each row of the state is read before it is written, by the same threads.
void HeadsOfToken::allocate(const Arrays& inputs, Arrays& outputs) {
  allocate_output(outputs[0], stream());
  const size_t last = outputs.size() - 1;
  for (size_t i = 1; i < last; ++i) {
    if (convolutions_) {
      take_or_allocate(outputs[i], inputs[convolutions_ + i - 1], stream(), outputs.size());
    } else {
      allocate_output(outputs[i], stream());
    }
  }
  if (inputs[state_].offset() % 16 == 0) {  // as it is written
    take_or_allocate(outputs[last], inputs[state_], stream(), outputs.size());
  } else {
    allocate_output(outputs[last], stream());
  }
}

}  // namespace mittens
