#include "ops/recurrence/state_space.h"

#include <functional>
#include <memory>
#include <utility>

#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "ops/recurrence/state_params.h"
#include "params/recurrence.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/gpu.h"
#include "runtime/primitive.h"

namespace mittens {

namespace {

constexpr const char* kernel = "state_space";
const Name file = "recurrence/state_space.metal";

mx::Dtype y_dtype(const Arrays& inputs) {
  return mx::promote_types(inputs[0].dtype(), inputs[4].dtype());
}

// By a recurrence whose gates and rates are mx's operations.
template <typename Recurrence>
Arrays by_recurrence(const Arrays& inputs, const StateSpaceOptions& options, mx::Stream stream,
                     const Recurrence& recurrence) {
  const StateSpaceArrays arrays(inputs, options);
  mx::array step =
      mx::add(in_dtype(arrays.dt, mx::float32, stream), in_dtype(arrays.dt_bias, mx::float32, stream), stream);
  step = mx::logaddexp(step, mx::array(0.0f), stream);
  step = mx::clip(step, mx::array(options.least_step), mx::array(options.greatest_step), stream);
  const mx::array rate = mx::exp(in_dtype(arrays.a_log, mx::float32, stream), stream);
  const mx::array decay = mx::exp(mx::negative(mx::multiply(step, rate, stream), stream), stream);
  Arrays all = {arrays.c, arrays.b, arrays.x, decay, step};
  all.insert(all.end(), inputs.begin() + 7, inputs.end());
  const Arrays results = recurrence(all, {options.has_state, options.has_mask, RecurrenceOp::ssm_update}, stream);
  const mx::array skipped = mx::multiply(arrays.x, mx::expand_dims(arrays.d, 1, stream), stream);
  return {mx::add(results[0], skipped, stream), results[1]};
}

class StateSpaceStep : public KernelPrimitive {
 public:
  StateSpaceStep(mx::Stream stream, const StateSpaceOptions& options) : KernelPrimitive(stream), options_(options) {}

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

  // By those of the recurrence, which has native code for them.
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override {
    if (runs_kernels(stream()) || outputs[0].size() == 0) {
      return KernelPrimitive::vjp(primals, cotangents, argnums, outputs);
    }
    Arrays chosen;
    for (int argument : argnums) {
      chosen.push_back(primals[argument]);
    }
    const auto function = [&](const Arrays& these) {
      Arrays inputs = primals;
      for (size_t i = 0; i < argnums.size(); ++i) {
        inputs[argnums[i]] = these[i];
      }
      return by_recurrence(inputs, options_, stream(), recurrence);
    };
    return mx::vjp(function, chosen, cotangents).second;
  }

 protected:
  // Rows of B, C and the state are read 16 bytes at a time.
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    const auto as_is = [&](size_t i) {
      const bool is_read_in_packs = i == 2 || i == 3 || (options_.has_state && i == 7);
      return is_row_contiguous(inputs[i], is_read_in_packs ? 16 : 1);
    };
    bool all = true;
    for (size_t i = 0; i < inputs.size(); ++i) {
      all = all && as_is(i);
    }
    for (size_t i = 0; !all && i < inputs.size(); ++i) {
      copies.push_back(as_is(i) ? inputs[i] : contiguous(inputs[i], stream()));
    }
    return all ? inputs : copies;
  }

  // Each row of the state is read before it is written, by the same threads.
  void allocate(const Arrays& inputs, Arrays& outputs) override {
    allocate_output(outputs[0], stream());
    if (options_.has_state) {
      take_or_allocate(outputs[1], inputs[7], stream(), 2);
    } else {
      allocate_output(outputs[1], stream());
    }
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

  Arrays composed(const Arrays& inputs) override {
    return state_space_composed(inputs, options_, stream());
  }

 private:
  StateSpaceOptions options_;
};

}  // namespace

Arrays state_space(const Arrays& inputs, const StateSpaceOptions& options, mx::Stream stream) {
  check_base<StateSpaceStep>();
  auto primitive = std::make_shared<StateSpaceStep>(stream, options);
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  return mx::array::make_arrays(std::move(shapes), {y_dtype(inputs), mx::float32}, primitive, inputs);
}

Arrays state_space_composed(const Arrays& inputs, const StateSpaceOptions& options, mx::Stream stream) {
  return by_recurrence(inputs, options, stream, recurrence_composed);
}

}  // namespace mittens
