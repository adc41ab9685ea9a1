#include "ops/recurrence/short_conv_token.h"

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "cpu/recurrence/token_layers.h"
#include "mlx/ops.h"
#include "ops/recurrence/token_layer.h"
#include "params/recurrence.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/calibration.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"
#include "runtime/primitive.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "short_conv_token";
const Name file = "recurrence/short_conv_token.metal";

// projected [batch, 3 * channels] or [batch, tokens, 3 * channels], conv_state [batch, taps - 1, channels], conv_weight
// [channels, taps] and maybe conv_bias [channels], of one dtype.
class ShortConvToken : public KernelPrimitive {
 public:
  using KernelPrimitive::KernelPrimitive;

  const char* name() const override {
    return "MittensShortConvToken";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return true;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {with_columns(inputs[0].shape(), inputs[2].shape(0)), inputs[1].shape()};
  }

  // The composition, for callers of the op.
  Arrays in_operations(const Arrays& inputs) {
    return composed(inputs);
  }

 protected:
  // A channel's window is read before it is moved on, by one thread; of several tokens by several.
  void allocate(const Arrays& inputs, Arrays& outputs) override {
    allocate_output(outputs[0], stream());
    if (tokens_of(inputs) == 1) {
      take_or_allocate(outputs[1], inputs[1], stream(), 2);
    } else {
      allocate_output(outputs[1], stream());
    }
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const bool has_bias = inputs.size() > 3;
    ShortConvTokenParams params{};
    params.channels = static_cast<uint32_t>(inputs[2].shape(0));
    params.taps = static_cast<uint32_t>(inputs[2].shape(1));
    params.has_bias = has_bias;
    params.tokens = static_cast<uint32_t>(tokens_of(inputs));
    params.in_place = inputs[1].size() > 0 && same_memory(inputs[1], outputs[1]);
    Launch launch;
    launch.file = file;
    const auto batch = static_cast<uint32_t>(inputs[0].shape(0));
    const uint32_t blocks = ceil_divide(params.channels, uint32_t(kShortConvThreads));
    if (params.tokens == 1) {
      launch.kernel = kernel_name(inputs[0].dtype(), op);
      launch.threadgroups = {blocks, batch, 1};
    } else {
      launch.kernel = kernel_name(inputs[0].dtype(), op, "several");
      launch.threadgroups = {blocks, ceil_divide(params.tokens, uint32_t(kShortConvTokens)), batch};
    }
    launch.threads = {kShortConvThreads, 1, 1};
    launch.input(inputs[0]).input_if(!params.in_place, inputs[params.in_place ? 0 : 1]).input(inputs[2]);
    launch.input_if(has_bias, inputs.back()).output(outputs[0]);
    return in_order((params.in_place ? launch.update(outputs[1]) : launch.output(outputs[1])).params(params));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const auto size = [&](int i, int axis) { return static_cast<size_t>(inputs[i].shape(axis)); };
    const cpu::ShortConvToken sizes = {size(0, 0), tokens_of(inputs), size(2, 0), size(2, 1)};
    const cpu::TokenConvolution convolution = {data_of(inputs[1]), data_of(inputs[2]),
                                               inputs.size() > 3 ? data_of(inputs[3]) : nullptr, data_of(outputs[1])};
    return [type = native_type(inputs[0].dtype()), sizes, projected = data_of(inputs[0]), convolution,
            y = data_of(outputs[0])] { cpu::short_conv_token(type, sizes, projected, convolution, y); };
  }

  Arrays composed(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const int batch = inputs[0].shape(0), channels = inputs[2].shape(0), taps = inputs[2].shape(1);
    const int tokens = static_cast<int>(tokens_of(inputs));
    const mx::Dtype dtype = inputs[0].dtype();
    const auto wide = [&](const mx::array& a) { return in_dtype(a, mx::float32, s); };
    const mx::array projected = mx::reshape(inputs[0], {batch, tokens, 3 * channels}, s);
    const auto third = [&](int i) {
      return mx::slice(projected, {0, 0, i * channels}, {batch, tokens, (i + 1) * channels}, s);
    };
    const mx::array x = in_dtype(mx::multiply(wide(third(0)), wide(third(2)), s), dtype, s);
    const mx::array window = mx::concatenate({inputs[1], x}, 1, s);
    const mx::array weight = mx::transpose(wide(inputs[2]), s);
    const auto term = [&](int j) {
      const mx::array part = mx::slice(window, {0, j, 0}, {batch, j + tokens, channels}, s);
      return mx::multiply(wide(part), mx::slice(weight, {j, 0}, {j + 1, channels}, s), s);
    };
    mx::array sum = term(0);
    for (int j = 1; j < taps; ++j) {
      sum = mx::add(sum, term(j), s);
    }
    if (inputs.size() > 3) {
      sum = mx::add(sum, wide(inputs[3]), s);
    }
    const mx::array y = in_dtype(mx::multiply(wide(third(1)), sum, s), dtype, s);
    return {mx::reshape(y, output_shapes(inputs)[0], s),
            mx::slice(window, {0, tokens, 0}, {batch, tokens + taps - 1, channels}, s)};
  }

 private:
  static size_t tokens_of(const Arrays& inputs) {
    return inputs[0].ndim() == 3 ? inputs[0].shape(1) : 1;
  }
};

}  // namespace

std::pair<mx::array, mx::array> short_conv_token(const mx::array& projected, const mx::array& conv_state,
                                                 const mx::array& conv_weight,
                                                 const std::optional<mx::array>& conv_bias, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const mx::array weight = taps_of_channels(op, conv_weight, {}, stream);
  const int channels = conv_weight.shape(0), taps = conv_weight.shape(1);
  if ((projected.ndim() != 2 && projected.ndim() != 3) || projected.shape(-1) != 3 * channels) {
    checks::fail(op, "projected has shape ", projected.shape(), ": expected [batch, ", 3 * channels, "] or [batch, ",
                 "tokens, ", 3 * channels, "], three times the channels of conv_weight");
  }
  check_shape(op, "conv_state", conv_state, {projected.shape(0), taps - 1, channels});
  if (conv_bias) {
    check_shape(op, "conv_bias", *conv_bias, {channels});
  }
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"projected", projected}});
  checks::kernel_dtype(op, {{"conv_state", conv_state}});
  checks::kernel_dtype(op, {{"conv_weight", conv_weight}});
  Arrays inputs = {projected, in_dtype(conv_state, dtype, stream), in_dtype(weight, dtype, stream)};
  if (conv_bias) {
    checks::kernel_dtype(op, {{"conv_bias", *conv_bias}});
    inputs.push_back(in_dtype(*conv_bias, dtype, stream));
  }
  const Problem problem = {
      op, dtype, 0, {problem_size(leading_size(projected, 1)), problem_size(channels), problem_size(taps), 1}};
  const auto primitive = std::make_shared<ShortConvToken>(stream);
  const bool by_mx = projected.size() == 0 || prefer_mx(problem, nullptr, stream);
  const Arrays all =
      by_mx ? primitive->in_operations(inputs) : results_of(primitive, std::move(inputs), {dtype, dtype});
  return {all[0], in_dtype(all[1], conv_state.dtype(), stream)};
}

namespace {

void bind(nb::module_& module) {
  bind_function(module, op, &short_conv_token, "projected"_a, "conv_state"_a, "conv_weight"_a,
                "conv_bias"_a.none() = nb::none(), nb::kw_only(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
