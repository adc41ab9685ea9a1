// A token of a short convolution and the projection before it in one launch, on GPUs whose products take in the norm
// that they read (ops/matmul/normed_row.h).
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "mlx/ops.h"
#include "ops/matmul/quantized_weights.h"
#include "ops/matmul/normed_row.h"
#include "ops/matmul/plan.h"
#include "ops/matmul/quantized_matmul.h"
#include "ops/recurrence/short_conv_token.h"
#include "ops/recurrence/token_layer.h"
#include "params/convolved_product.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/calibration.h"
#include "runtime/checks.h"
#include "runtime/fallback.h"
#include "runtime/primitive.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "short_conv_token";
const Name file = "recurrence/apple/short_conv_product.metal";
constexpr size_t state_input = 4;

// row float32 [.., columns], a triple [3 * channels, columns], conv_state [1, taps - 1, channels], conv_weight
// [channels, taps], conv_bias [channels], if there is one, and squares [blocks] -> y [1, channels], and the next state.
class ShortConvProduct : public KernelPrimitive {
 public:
  ShortConvProduct(mx::Stream stream, QuantizedFormat format, NormOfRow norm)
      : KernelPrimitive(stream), format_(format), norm_(norm) {}

  const char* name() const override {
    return "MittensShortConvProduct";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& product = static_cast<const ShortConvProduct&>(other);
    return format_ == product.format_ && norm_ == product.norm_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {{1, inputs[5].shape(0)}, inputs[state_input].shape()};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    const bool as_is = is_prepared_triple(inputs[1], inputs[2], inputs[3]) && is_contiguous(inputs[0]) &&
                       std::all_of(inputs.begin() + state_input, inputs.end(), is_contiguous);
    return as_is ? inputs : row_contiguous(inputs, stream(), copies, 16);
  }

  // A channel's window is read before it is moved on, by one thread.
  void allocate(const Arrays& inputs, Arrays& outputs) override {
    allocate_output(outputs[0], stream());
    take_or_allocate(outputs[1], inputs[state_input], stream(), 2);
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& state = inputs[state_input];
    const auto channels = static_cast<uint32_t>(outputs[0].shape(-1));
    ConvolvedProductParams params{};
    params.weights = quantized_params(inputs[1], inputs[2], inputs[3], format_);
    params.weights.rows = 1;
    params.weights.columns = static_cast<uint32_t>(inputs[0].shape(-1));
    params.weights.outputs = channels;
    params.norm = norm_params(norm_, inputs.back());
    params.taps = static_cast<uint32_t>(inputs[5].shape(1));
    params.has_bias = has_bias(inputs);
    params.in_place = state.size() > 0 && same_memory(state, outputs[1]);
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(norm_.dtype, op, "product_", format_name(format_));
    share_out(launch, plan_rows({1, 1, params.weights.columns, channels}, kConvolvedChannels, stream()), 1);
    launch.input(inputs[0]);
    for (int i = 1; i < 4; ++i) {
      add_view(launch, inputs[i]);
    }
    launch.input(inputs.back()).input_if(!params.in_place, params.in_place ? inputs.back() : state).input(inputs[5]);
    launch.input_if(params.has_bias, params.has_bias ? inputs[6] : inputs[5]).output(outputs[0]);
    return in_order((params.in_place ? launch.update(outputs[1]) : launch.output(outputs[1])).params(params));
  }

  Arrays composed(const Arrays& inputs) override {
    const mx::array x = mx::reshape(compose_row(inputs, norm_, stream()), {1, inputs[0].shape(-1)}, stream());
    const auto biases = format_.has_biases() ? std::optional(inputs[3]) : std::nullopt;
    const mx::array projected = quantized_matmul(x, inputs[1], inputs[2], biases, true, format_.group_size,
                                                 format_.bits, mode_name(format_), std::nullopt, stream());
    const auto bias = has_bias(inputs) ? std::optional(inputs[6]) : std::nullopt;
    auto [y, state] = short_conv_token(projected, inputs[state_input], inputs[5], bias, stream());
    return {std::move(y), std::move(state)};
  }

 private:
  static bool has_bias(const Arrays& inputs) {
    return inputs.size() > 7;
  }

  QuantizedFormat format_;
  NormOfRow norm_;
};

// y and the next state of a token whose projection reads x, which nothing but the caller holds; none where x is no norm
// that the product before it takes in, or where arrays are not of one dtype.
std::optional<std::pair<mx::array, mx::array>> short_conv_token_of_norm(
    const mx::array& x, const Arrays& triple, std::optional<int> group_size, std::optional<int> bits,
    const std::string& mode, const mx::array& conv_state, const mx::array& conv_weight,
    const std::optional<mx::array>& conv_bias, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  if (!multiplies_several(stream) || !shares_norm(stream) || is_switched_off(op) || leading_size(x, 1) != 1) {
    return std::nullopt;
  }
  const QuantizedFormat format = quantized_format(op, group_size, bits, true, mode);
  check_triple_size(op, "the projection", triple, format);
  const auto biases = format.has_biases() ? std::optional(triple[2]) : std::nullopt;
  const QuantizedShape shape = check_quantized(op, x, triple[0], triple[1], biases, format);
  const mx::array weight = taps_of_channels(op, conv_weight, {}, stream);
  const int channels = weight.shape(0);
  if (triple[0].ndim() != 2 || shape.outputs != 3 * channels) {
    checks::fail(op, "the projection has ", shape.outputs, " outputs: expected ", 3 * channels,
                 ", three times the channels of conv_weight");
  }
  check_shape(op, "conv_state", conv_state, {1, weight.shape(1) - 1, channels});
  if (conv_bias) {
    check_shape(op, "conv_bias", *conv_bias, {channels});
  }
  const auto is_of_type = [&](const mx::array& a) { return a.dtype() == x.dtype(); };
  const bool is_one_type = is_of_type(conv_state) && is_of_type(weight) && (!conv_bias || is_of_type(*conv_bias)) &&
                           (!biases || (is_of_type(triple[1]) && is_of_type(*biases)));
  if (!is_one_type || !has_common_kernels(format) || x.size() == 0 || channels == 0) {
    return std::nullopt;
  }
  const auto count = [](int n) { return static_cast<uint32_t>(n); };
  const ProductSizes sizes{1, 1, count(shape.columns), count(shape.outputs)};
  const Problem product = product_problem("quantized_matmuls", x.dtype(), format_number(format), sizes);
  const Problem convolution = {op, x.dtype(), 0, {1, problem_size(channels), problem_size(weight.shape(1)), 1}};
  if (prefer_mx(product, nullptr, stream) || prefer_mx(convolution, nullptr, stream)) {
    return std::nullopt;
  }
  constexpr long holders = 1;  // the caller
  const auto row = take_normed_row(x, holders, stream);
  if (!row) {
    return std::nullopt;
  }
  Arrays inputs = {row->scaled, triple[0], triple[1], triple[format.has_biases() ? 2 : 1], conv_state, weight};
  if (conv_bias) {
    inputs.push_back(*conv_bias);
  }
  inputs.push_back(row->squares);
  const Arrays all = results_of(std::make_shared<ShortConvProduct>(stream, format, row->norm), std::move(inputs),
                                {x.dtype(), x.dtype()});
  return std::pair(all[0], all[1]);
}

void bind(nb::module_& module) {
  module.def("short_conv_token_of_norm", &short_conv_token_of_norm, "x"_a, "triple"_a, "group_size"_a.none(),
             "bits"_a.none(), "mode"_a, "conv_state"_a, "conv_weight"_a, "conv_bias"_a.none() = nb::none(),
             nb::kw_only(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
