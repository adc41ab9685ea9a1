#include <optional>
#include <tuple>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include "mlx/ops.h"
#include "ops/recurrence/layer_inputs.h"
#include "ops/recurrence/token_layer.h"
#include "python/registry.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "ssm_inputs";

using Optional = std::optional<mx::array>;
// x, B, C and the convolution's next state.
using Outputs = std::tuple<mx::array, mx::array, mx::array, mx::array>;

Outputs ssm_inputs(const mx::array& mixed, const Optional& conv_state, const mx::array& conv_weight,
                   const Optional& conv_bias, int inner, const Optional& mask, const Optional& lengths,
                   mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const mx::array weight = taps_of_channels(op, conv_weight, {}, stream);
  const int channels = weight.shape(0), taps = weight.shape(1);
  if (mixed.ndim() != 3 || mixed.shape(2) != channels) {
    checks::fail(op, "mixed has shape ", mixed.shape(), ": expected [batch, steps, ", channels,
                 "], the channels of conv_weight");
  }
  check_inner(op, inner, channels);
  const int batch = mixed.shape(0), steps = mixed.shape(1);
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"mixed", mixed}});
  checks::kernel_dtype(op, {{"conv_weight", conv_weight}});
  Arrays inputs = {mixed};
  if (conv_state) {
    check_shape(op, "conv_state", *conv_state, {batch, taps - 1, channels});
    checks::kernel_dtype(op, {{"conv_state", *conv_state}});
    inputs.push_back(in_dtype(*conv_state, dtype, stream));
  }
  inputs.push_back(in_dtype(weight, dtype, stream));
  if (conv_bias) {
    check_shape(op, "conv_bias", *conv_bias, {channels});
    checks::kernel_dtype(op, {{"conv_bias", *conv_bias}});
    inputs.push_back(in_dtype(*conv_bias, dtype, stream));
  }
  check_steps(op, mask, lengths, batch, steps);
  add_steps(inputs, mask, lengths, steps, stream);
  const LayerInputsOptions options = {
      1, conv_state ? 1u : 0u, 1, conv_bias.has_value(), false, mask.has_value(), lengths.has_value(), inner, 0};
  const Arrays all = layer_inputs(op, std::move(inputs), options, stream);
  return {all[0], all[1], all[2], conv_state ? in_dtype(all[3], conv_state->dtype(), stream) : all[3]};
}

void bind(nb::module_& module) {
  bind_function(module, op, &ssm_inputs, "mixed"_a, "conv_state"_a.none(), "conv_weight"_a, "conv_bias"_a.none(),
                "inner"_a, "mask"_a.none() = nb::none(), "lengths"_a.none() = nb::none(), nb::kw_only(),
                "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
