#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include "cpu/recurrence/token_layers.h"
#include "mlx/ops.h"
#include "ops/recurrence/state_params.h"
#include "ops/recurrence/token_layer.h"
#include "params/recurrence.h"
#include "python/registry.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/op_binding.h"
#include "runtime/primitive.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "ssm_token";
const Name file = "recurrence/ssm_token.metal";

using Limits = std::pair<double, double>;
using Outputs = std::tuple<mx::array, mx::array, mx::array>;

struct TokenOptions {
  float least_step;
  float greatest_step;
  bool is_gated;

  bool operator==(const TokenOptions&) const = default;
};

// The inputs by name: the first three and the bias have one dtype, the state float32.
struct TokenArrays {
  const mx::array &projected, &conv_state, &conv_weight, &a_log, &d, &dt_bias, &state;
  const mx::array* conv_bias;

  explicit TokenArrays(const Arrays& inputs)
      : projected(inputs[0]),
        conv_state(inputs[1]),
        conv_weight(inputs[2]),
        a_log(inputs[3]),
        d(inputs[4]),
        dt_bias(inputs[5]),
        state(inputs[6]),
        conv_bias(inputs.size() > 7 ? &inputs[7] : nullptr) {}

  int batch() const {
    return state.shape(0);
  }
  int heads() const {
    return state.shape(1);
  }
  int rows() const {
    return state.shape(2);
  }
  int columns() const {
    return state.shape(3);
  }
  int taps() const {
    return conv_weight.shape(1);
  }
  int inner() const {
    return heads() * rows();
  }
  int channels() const {
    return conv_weight.shape(0);
  }
  int groups() const {
    return columns() == 0 ? 1 : (channels() - inner()) / (2 * columns());
  }
  cpu::Recurrence sizes() const {
    const auto size = [](int n) { return static_cast<size_t>(n); };
    return {size(batch()), 1, size(heads()), size(groups()), size(rows()), size(columns()), false, false};
  }
};

constexpr size_t state_index = 6;  // of the inputs

class SsmToken : public HeadsOfToken {
 public:
  SsmToken(mx::Stream stream, const TokenOptions& options) : HeadsOfToken(stream, state_index), options_(options) {}

  const char* name() const override {
    return "MittensSsmToken";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const SsmToken&>(other).options_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const TokenArrays arrays(inputs);
    return {{arrays.batch(), arrays.inner()}, arrays.conv_state.shape(), arrays.state.shape()};
  }

 protected:
  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const TokenArrays arrays(inputs);
    SsmTokenParams params{};  // simulators compare its padding too
    params.state = token_params(arrays.sizes());
    params.taps = static_cast<uint32_t>(arrays.taps());
    params.has_bias = arrays.conv_bias != nullptr;
    params.is_gated = options_.is_gated;
    params.a_log_type = number_type(arrays.a_log.dtype());
    params.d_type = number_type(arrays.d.dtype());
    params.dt_bias_type = number_type(arrays.dt_bias.dtype());
    params.least_step = options_.least_step;
    params.greatest_step = options_.greatest_step;
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(arrays.projected.dtype(), op);
    share_out_heads(launch, params.state, arrays.batch());
    launch.input(arrays.projected).input(arrays.conv_state).input(arrays.conv_weight);
    launch.input_if(params.has_bias, inputs[params.has_bias ? 7 : 0]);
    launch.input(arrays.a_log).input(arrays.d).input(arrays.dt_bias).input(arrays.state);
    return in_order(launch.output(outputs[0]).output(outputs[1]).output(outputs[2]).params(params));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const TokenArrays arrays(inputs);
    const cpu::Recurrence all = arrays.sizes();
    const cpu::SsmToken sizes = {all.batch,           all.heads,
                                 all.key_heads,       all.rows,
                                 all.columns,         static_cast<size_t>(arrays.taps()),
                                 options_.least_step, options_.greatest_step,
                                 options_.is_gated};
    const cpu::TokenConvolution convolution = {data_of(arrays.conv_state), data_of(arrays.conv_weight),
                                               arrays.conv_bias ? data_of(*arrays.conv_bias) : nullptr,
                                               data_of(outputs[1])};
    const cpu::SsmTokenInputs data = {data_of(arrays.projected),      convolution,
                                      native_numbers(arrays.a_log),   native_numbers(arrays.d),
                                      native_numbers(arrays.dt_bias), arrays.state.data<float>()};
    return [type = native_type(arrays.projected.dtype()), sizes, data, y = data_of(outputs[0]),
            state = outputs[2].data<float>()] { cpu::ssm_token(type, sizes, data, y, state); };
  }

  Arrays composed(const Arrays& inputs) override {
    const TokenArrays arrays(inputs);
    const mx::Stream s = stream();
    const int batch = arrays.batch(), heads = arrays.heads(), rows = arrays.rows(), columns = arrays.columns();
    const int groups = arrays.groups(), each = heads / std::max(groups, 1), inner = arrays.inner();
    const int channels = arrays.channels(), of_columns = groups * columns;
    const auto wide = [&](const mx::array& a) { return in_dtype(a, mx::float32, s); };
    const auto silu = [&](const mx::array& x) { return mx::multiply(x, mx::sigmoid(x, s), s); };
    const auto part = [&](const mx::array& a, int begin, int size, mx::Shape shape) {
      return mx::reshape(mx::slice(a, {0, begin}, {batch, begin + size}, s), std::move(shape), s);
    };
    const mx::array mixed = part(arrays.projected, inner, channels, {batch, 1, channels});
    const mx::array window = mx::concatenate({arrays.conv_state, mixed}, 1, s);
    const mx::array weight = mx::transpose(wide(arrays.conv_weight), s);
    mx::array sum = mx::sum(mx::multiply(wide(window), weight, s), 1, false, s);
    if (arrays.conv_bias) {
      sum = mx::add(sum, wide(*arrays.conv_bias), s);
    }
    const mx::array c = silu(sum);
    const mx::array x = part(c, 0, inner, {batch, groups, each, rows, 1});
    const mx::array writes = part(c, inner, of_columns, {batch, groups, 1, 1, columns});
    const mx::array reads = part(c, inner + of_columns, of_columns, {batch, groups, 1, 1, columns});
    const auto by_head = [&](const mx::array& a) { return mx::reshape(wide(a), {1, groups, each, 1, 1}, s); };
    const mx::array dt = wide(part(arrays.projected, inner + channels, heads, {batch, groups, each, 1, 1}));
    mx::array step = mx::logaddexp(mx::add(dt, by_head(arrays.dt_bias), s), mx::array(0.0f), s);
    step = mx::clip(step, mx::array(options_.least_step), mx::array(options_.greatest_step), s);
    const mx::array gate = mx::exp(mx::negative(mx::multiply(step, mx::exp(by_head(arrays.a_log), s), s), s), s);
    mx::array state = mx::reshape(arrays.state, {batch, groups, each, rows, columns}, s);
    state = mx::add(mx::multiply(state, gate, s), mx::multiply(mx::multiply(step, x, s), writes, s), s);
    mx::array y = mx::sum(mx::multiply(state, reads, s), -1, true, s);
    y = mx::reshape(mx::add(y, mx::multiply(by_head(arrays.d), x, s), s), {batch, inner}, s);
    if (options_.is_gated) {
      y = mx::multiply(y, silu(wide(part(arrays.projected, 0, inner, {batch, inner}))), s);
    }
    return {in_dtype(y, arrays.projected.dtype(), s), mx::slice(window, {0, 1, 0}, {batch, arrays.taps(), channels}, s),
            mx::reshape(state, arrays.state.shape(), s)};
  }

 private:
  TokenOptions options_;
};

Outputs ssm_token(const mx::array& projected, const mx::array& conv_state, const mx::array& conv_weight,
                  const std::optional<mx::array>& conv_bias, const mx::array& a_log, const mx::array& d,
                  const mx::array& dt_bias, const mx::array& state, const Limits& limits, bool gated,
                  mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  if (state.ndim() != 4) {
    checks::fail(op, "state has shape ", state.shape(), ": expected [batch, heads, rows, columns]");
  }
  const int batch = state.shape(0), heads = state.shape(1), rows = state.shape(2), columns = state.shape(3);
  const mx::array weight = taps_of_channels(op, conv_weight, {}, stream);
  const int channels = conv_weight.shape(0), taps = conv_weight.shape(1), shared = channels - heads * rows;
  const bool has_groups = shared >= 0 && (columns == 0 ? shared == 0 : shared % (2 * columns) == 0);
  const int groups = columns == 0 || !has_groups ? 1 : shared / (2 * columns);
  if (!has_groups || (groups == 0 ? heads != 0 : heads % groups != 0)) {
    checks::fail(op, "conv_weight has ", channels, " channels, state has shape ", state.shape(),
                 ": expected heads * rows + 2 * groups * columns of them, the heads a multiple of the groups");
  }
  check_shape(op, "projected", projected, {batch, heads * rows + channels + heads});
  check_shape(op, "conv_state", conv_state, {batch, taps - 1, channels});
  if (conv_bias) {
    check_shape(op, "conv_bias", *conv_bias, {channels});
  }
  check_shape(op, "A_log", a_log, {heads});
  check_shape(op, "D", d, {heads});
  check_shape(op, "dt_bias", dt_bias, {heads});
  if (!(limits.first <= limits.second)) {
    checks::fail(op, "time_step_limit is (", limits.first, ", ", limits.second,
                 "): expected the least and the greatest time step, in this order");
  }
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"projected", projected}});
  for (const auto& [name, array] :
       {std::pair("conv_state", &conv_state), std::pair("conv_weight", &conv_weight), std::pair("A_log", &a_log),
        std::pair("D", &d), std::pair("dt_bias", &dt_bias), std::pair("state", &state)}) {
    checks::kernel_dtype(op, {{name, *array}});
  }
  Arrays inputs = {projected, in_dtype(conv_state, dtype, stream), in_dtype(weight, dtype, stream), a_log, d,
                   dt_bias,   in_dtype(state, mx::float32, stream)};
  if (conv_bias) {
    checks::kernel_dtype(op, {{"conv_bias", *conv_bias}});
    inputs.push_back(in_dtype(*conv_bias, dtype, stream));
  }
  const cpu::Recurrence sizes = TokenArrays(inputs).sizes();
  const TokenOptions options = {static_cast<float>(limits.first), static_cast<float>(limits.second), gated};
  const auto primitive = std::make_shared<SsmToken>(stream, options);
  const bool by_mx = token_goes_to_mx(op, dtype, sizes, projected.size() == 0 || state.size() == 0, stream);
  const Arrays all =
      by_mx ? primitive->in_operations(inputs) : results_of(primitive, inputs, {dtype, dtype, mx::float32});
  return {all[0], in_dtype(all[1], conv_state.dtype(), stream), in_dtype(all[2], state.dtype(), stream)};
}

void bind(nb::module_& module) {
  bind_function(module, op, &ssm_token, "projected"_a, "conv_state"_a, "conv_weight"_a, "conv_bias"_a.none(), "A_log"_a,
                "D"_a, "dt_bias"_a, "state"_a, nb::kw_only(), "time_step_limit"_a = Limits(0.001, 100.0),
                "gated"_a = true, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
