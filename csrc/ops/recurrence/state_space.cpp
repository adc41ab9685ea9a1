#include "ops/recurrence/state_space.h"

#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "mlx/ops.h"
#include "ops/recurrence/recurrence_primitive.h"
#include "ops/recurrence/state_params.h"
#include "params/recurrence.h"
#include "runtime/array_util.h"

namespace mittens {

namespace {

constexpr const char* kernel = "state_space";
const Name file = "recurrence/state_space.metal";

class StateSpaceStep : public RecurrencePrimitive {
 public:
  StateSpaceStep(mx::Stream stream, const StateSpaceOptions& options)
      : RecurrencePrimitive(stream), options_(options) {}

  const char* name() const override {
    return "MittensSsmUpdate";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const StateSpaceStep&>(other).options_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const StateSpaceArrays arrays(inputs, options_);
    return {arrays.x.shape(), arrays.state_shape()};
  }

 protected:
  Parts parts(const Arrays& inputs) override {
    const StateSpaceArrays arrays(inputs, options_);
    const mx::Stream s = stream();
    mx::array dt = in_dtype(arrays.dt, mx::float32, s);
    if (arrays.mask) {  // a hidden step adds nothing to the gradients of shared parameters, even if it is NaN
      dt = mx::where(mx::expand_dims(*arrays.mask, 2, s), dt, mx::array(0.0f), s);
    }
    mx::array step = mx::add(dt, in_dtype(arrays.dt_bias, mx::float32, s), s);
    step = mx::logaddexp(step, mx::array(0.0f), s);
    step = mx::clip(step, mx::array(options_.least_step), mx::array(options_.greatest_step), s);
    const mx::array rate = mx::exp(in_dtype(arrays.a_log, mx::float32, s), s);
    const mx::array decay = mx::exp(mx::negative(mx::multiply(step, rate, s), s), s);
    Arrays all = {arrays.c, arrays.b, arrays.x, decay, step};
    all.insert(all.end(), inputs.begin() + 7, inputs.end());
    return {std::move(all),
            {options_.has_state, options_.has_mask, false},
            mx::multiply(arrays.x, mx::expand_dims(arrays.d, 1, s), s)};
  }

  mx::Dtype y_dtype(const Arrays& inputs) const override {
    return mx::promote_types(inputs[0].dtype(), inputs[4].dtype());
  }

  std::optional<size_t> state_index() const override {
    return options_.has_state ? std::optional<size_t>(7) : std::nullopt;
  }

  bool is_read_in_packs(size_t input) const override {
    return input == 2 || input == 3;  // B and C
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const StateSpaceArrays arrays(inputs, options_);
    StateSpaceParams params;
    params.state = state_params(arrays.c, arrays.x, options_.has_state, options_.has_mask);
    params.a_log_type = number_type(arrays.a_log.dtype());
    params.d_type = number_type(arrays.d.dtype());
    params.dt_type = number_type(arrays.dt.dtype());
    params.dt_bias_type = number_type(arrays.dt_bias.dtype());
    params.wide_y = outputs[0].dtype() == mx::float32;
    params.least_step = options_.least_step;
    params.greatest_step = options_.greatest_step;
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(arrays.x.dtype(), kernel);
    launch.threadgroups = state_grid(params.state, arrays.x.shape(0));
    launch.threads = {32 * kStateSimdgroups, 1, 1};
    launch.input(arrays.x).input(arrays.a_log).input(arrays.b).input(arrays.c).input(arrays.d);
    launch.input(arrays.dt).input(arrays.dt_bias);
    launch.input_if(options_.has_state, options_.has_state ? *arrays.state : arrays.x);
    launch.input_if(options_.has_mask, options_.has_mask ? *arrays.mask : arrays.x);
    return in_order(launch.output(outputs[0]).output(outputs[1]).params(params));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const StateSpaceArrays arrays(inputs, options_);
    const auto numbers = [](const mx::array& a) { return cpu::Numbers{data_of(a), native_type(a.dtype())}; };
    const cpu::StateSpaceInputs data = {data_of(arrays.x),
                                        data_of(arrays.b),
                                        data_of(arrays.c),
                                        numbers(arrays.a_log),
                                        numbers(arrays.d),
                                        numbers(arrays.dt),
                                        numbers(arrays.dt_bias),
                                        arrays.state ? arrays.state->data<float>() : nullptr,
                                        arrays.mask ? arrays.mask->data<bool>() : nullptr,
                                        options_.least_step,
                                        options_.greatest_step};
    return [type = native_type(arrays.x.dtype()), sizes = arrays.native_sizes(), data,
            y_type = native_type(outputs[0].dtype()), y = data_of(outputs[0]),
            state = outputs[1].data<float>()] { cpu::state_space(type, sizes, data, y_type, y, state); };
  }

 private:
  StateSpaceOptions options_;
};

}  // namespace

Arrays state_space(const Arrays& inputs, const StateSpaceOptions& options, mx::Stream stream) {
  check_base<StateSpaceStep>();
  auto primitive = std::make_shared<StateSpaceStep>(stream, options);
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  return mx::array::make_arrays(
      std::move(shapes), {mx::promote_types(inputs[0].dtype(), inputs[4].dtype()), mx::float32}, primitive, inputs);
}

Arrays state_space_composed(const Arrays& inputs, const StateSpaceOptions& options, mx::Stream stream) {
  return StateSpaceStep(stream, options).composed(inputs);
}

}  // namespace mittens
