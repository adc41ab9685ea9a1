// Linear attention: a state S [rows, columns] for each head of each sequence, and for each step
//
//   S = S * decay;   S += v k^T;   y = scale S q
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include "mlx/ops.h"
#include "ops/recurrence/plan.h"
#include "ops/recurrence/recurrence_primitive.h"
#include "ops/recurrence/state_params.h"
#include "params/recurrence.h"
#include "python/registry.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "linear_attention";
const Name file = "recurrence/linear_attention.metal";

using Decay = std::variant<std::monostate, double, mx::array>;
using Outputs = std::tuple<mx::array, mx::array>;

struct Options {
  bool has_decays;  // an array of them, else `decay`
  bool has_state;  // else it begins with zeros
  float decay;
  float scale;

  bool operator==(const Options&) const = default;
};

// q and k [batch, steps, key_heads, columns], v [batch, steps, heads, rows] of one dtype, decays [heads] of any of the
// kernels' dtypes, and the state [batch, heads, rows, columns] in float32.
struct Named {
  const mx::array &q, &k, &v;
  const mx::array *decays, *state;

  Named(const Arrays& inputs, const Options& options)
      : q(inputs[0]),
        k(inputs[1]),
        v(inputs[2]),
        decays(options.has_decays ? &inputs[3] : nullptr),
        state(options.has_state ? &inputs[options.has_decays ? 4 : 3] : nullptr) {}

  cpu::Recurrence native_sizes() const {
    return native_recurrence(q, v, false, false);
  }
  mx::Shape state_shape() const {
    return {v.shape(0), v.shape(2), v.shape(3), q.shape(3)};
  }
};

class LinearAttention : public RecurrencePrimitive {
 public:
  LinearAttention(mx::Stream stream, const Options& options) : RecurrencePrimitive(stream), options_(options) {}

  const char* name() const override {
    return "MittensLinearAttention";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const LinearAttention&>(other).options_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const Named arrays(inputs, options_);
    return {arrays.v.shape(), arrays.state_shape()};
  }

 protected:
  Parts parts(const Arrays& inputs) override {
    const Named arrays(inputs, options_);
    const bool scales = options_.scale != 1;
    const mx::Dtype dtype = scales ? mx::float32 : arrays.q.dtype();  // scaled values may overflow a half type
    const auto typed = [&](const mx::array& a) { return in_dtype(a, dtype, stream()); };
    const mx::Shape per_head = {arrays.v.shape(0), arrays.v.shape(1), arrays.v.shape(2)};
    const mx::array decays =
        arrays.decays ? in_dtype(*arrays.decays, mx::float32, stream()) : mx::array(options_.decay);
    const mx::array q = typed(arrays.q);
    Arrays all = {scales ? mx::multiply(q, mx::array(options_.scale), stream()) : q, typed(arrays.k), typed(arrays.v),
                  mx::broadcast_to(decays, per_head, stream()), mx::ones(per_head, dtype, stream())};
    if (arrays.state) {
      all.push_back(*arrays.state);
    }
    return {std::move(all), {options_.has_state, false, false}, std::nullopt};
  }

  std::optional<size_t> state_index() const override {
    return options_.has_state ? std::optional<size_t>(options_.has_decays ? 4 : 3) : std::nullopt;
  }

  bool is_read_in_packs(size_t input) const override {
    return input < 2;  // q and k
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const Named arrays(inputs, options_);
    LinearAttentionParams params;
    params.state = state_params(arrays.q, arrays.v, options_.has_state, false);
    params.has_decays = options_.has_decays;
    params.decay_type = arrays.decays ? number_type(arrays.decays->dtype()) : 0;
    params.decay = options_.decay;
    params.scale = options_.scale;
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(arrays.q.dtype(), op);
    launch.threadgroups = state_grid(params.state, arrays.q.shape(0));
    launch.threads = {32 * kStateSimdgroups, 1, 1};
    launch.input(arrays.q).input(arrays.k).input(arrays.v);
    launch.input_if(options_.has_decays, options_.has_decays ? *arrays.decays : arrays.q);
    launch.input_if(options_.has_state, options_.has_state ? *arrays.state : arrays.q);
    return in_order(launch.output(outputs[0]).output(outputs[1]).params(params));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const Named arrays(inputs, options_);
    const cpu::LinearAttentionInputs data = {data_of(arrays.q),
                                             data_of(arrays.k),
                                             data_of(arrays.v),
                                             {arrays.decays ? data_of(*arrays.decays) : nullptr,
                                              native_type(arrays.decays ? arrays.decays->dtype() : mx::float32)},
                                             arrays.state ? arrays.state->data<float>() : nullptr,
                                             options_.decay,
                                             options_.scale};
    return [type = native_type(arrays.q.dtype()), sizes = arrays.native_sizes(), data, y = data_of(outputs[0]),
            state = outputs[1].data<float>()] { cpu::linear_attention(type, sizes, data, y, state); };
  }

 private:
  Options options_;
};

struct Call {
  Arrays inputs;
  Options options;
  mx::Dtype state_dtype;  // of the last state that the caller gets
};

Call checked(const mx::array& q, const mx::array& k, const mx::array& v, const Decay& decay, std::optional<float> scale,
             const std::optional<mx::array>& state, mx::Stream stream) {
  check_queries_keys_values(op, q, k, v);
  const int heads = v.shape(2), columns = q.shape(3);
  const mx::Shape of_state = {v.shape(0), heads, v.shape(3), columns};
  if (state && state->shape() != of_state) {
    checks::fail(op, "state has shape ", state->shape(), ": expected ", of_state);
  }
  if (scale && !std::isfinite(*scale)) {
    checks::fail(op, "scale is ", *scale, ": expected a finite number");
  }
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"q", q}, {"k", k}, {"v", v}});
  Arrays inputs = {in_dtype(q, dtype, stream), in_dtype(k, dtype, stream), in_dtype(v, dtype, stream)};
  Options options = {false, state.has_value(), 1.0f, 1.0f};
  if (const mx::array* decays = std::get_if<mx::array>(&decay)) {
    if (decays->shape() != mx::Shape{heads}) {
      checks::fail(op, "decay has shape ", decays->shape(), ": expected a number or ", mx::Shape{heads});
    }
    checks::kernel_dtype(op, {{"decay", *decays}});
    inputs.push_back(*decays);
    options.has_decays = true;
  } else if (const double* number = std::get_if<double>(&decay)) {
    if (!(*number > 0 && *number <= 1)) {
      checks::fail(op, "decay is ", *number, ": expected more than 0, and at most 1");
    }
    options.decay = static_cast<float>(*number);
  }
  options.scale = scale.value_or(columns == 0 ? 1.0f : 1 / std::sqrt(static_cast<float>(columns)));
  if (state) {
    checks::kernel_dtype(op, {{"state", *state}});
    inputs.push_back(in_dtype(*state, mx::float32, stream));
  }
  return {std::move(inputs), options, state ? state->dtype() : mx::float32};
}

// y and the last state in float32.
Arrays computed(const Call& call, mx::Stream stream) {
  const Named arrays(call.inputs, call.options);
  if (arrays.q.size() == 0 || arrays.v.size() == 0) {
    return {mx::zeros_like(arrays.v, stream),
            arrays.state ? *arrays.state : mx::zeros(arrays.state_shape(), mx::float32, stream)};
  }
  const mx::Dtype dtype = arrays.q.dtype();
  auto primitive = std::make_shared<LinearAttention>(stream, call.options);
  if (goes_to_mx(op, dtype, arrays.native_sizes(), why_mx_uncorrected(arrays.q.shape(1), stream), stream)) {
    return primitive->composed(call.inputs);
  }
  std::vector<mx::Shape> shapes = primitive->output_shapes(call.inputs);
  return mx::array::make_arrays(std::move(shapes), {dtype, mx::float32}, primitive, call.inputs);
}

Outputs linear_attention(const mx::array& q, const mx::array& k, const mx::array& v, const Decay& decay,
                         std::optional<float> scale, const std::optional<mx::array>& state, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const Call call = checked(q, k, v, decay, scale, state, stream);
  const Arrays all = computed(call, stream);
  return {all[0], in_dtype(all[1], call.state_dtype, stream)};
}

void bind(nb::module_& module) {
  bind_function(module, op, &linear_attention, "q"_a, "k"_a, "v"_a, nb::kw_only(), "decay"_a.none() = nb::none(),
                "scale"_a.none() = nb::none(), "state"_a.none() = nb::none(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
