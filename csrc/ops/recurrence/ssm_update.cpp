#include <optional>
#include <tuple>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include "mlx/ops.h"
#include "ops/recurrence/plan.h"
#include "ops/recurrence/state_space.h"
#include "python/registry.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "ssm_update";

using Optional = std::optional<mx::array>;
using Limits = std::pair<double, double>;
using Outputs = std::tuple<mx::array, mx::array>;

void has_shape(const char* name, const mx::array& array, const mx::Shape& shape) {
  if (array.shape() != shape) {
    checks::fail(op, name, " has shape ", array.shape(), ": expected ", shape);
  }
}

// The steps that are seen.
Optional seen_steps(const Optional& mask, const Optional& lengths, int steps, mx::Stream stream) {
  if (!lengths) {
    return mask;
  }
  const mx::array position = mx::arange(0, steps, mx::int64, stream);  // a narrow type may not hold all
  const mx::array within =
      mx::less(position, mx::expand_dims(in_dtype(*lengths, mx::int64, stream), 1, stream), stream);
  return mask ? mx::logical_and(*mask, within, stream) : within;
}

struct Call {
  Arrays inputs;  // as of state_space()
  StateSpaceOptions options;
  mx::Dtype y_dtype;  // of the result
  mx::Dtype state_dtype;
};

Call checked(const mx::array& x, const mx::array& a_log, const mx::array& b, const mx::array& c, const mx::array& d,
             const mx::array& dt, const mx::array& dt_bias, const Optional& state, const Limits& limits,
             const Optional& mask, const Optional& lengths, mx::Stream stream) {
  if (x.ndim() != 4) {
    checks::fail(op, "hidden_states has shape ", x.shape(), ": expected [batch, steps, heads, rows]");
  }
  const int batch = x.shape(0), steps = x.shape(1), heads = x.shape(2);
  if (b.ndim() != 4 || b.shape(0) != batch || b.shape(1) != steps ||
      (b.shape(2) == 0 ? heads != 0 : heads % b.shape(2) != 0)) {
    checks::fail(op, "B has shape ", b.shape(), ", hidden_states has shape ", x.shape(),
                 ": expected [batch, steps, groups, columns], the heads a multiple of the groups");
  }
  has_shape("C", c, b.shape());
  has_shape("A_log", a_log, {heads});
  has_shape("D", d, {heads});
  has_shape("dt", dt, {batch, steps, heads});
  has_shape("dt_bias", dt_bias, {heads});
  if (state) {
    has_shape("state", *state, {batch, heads, x.shape(3), b.shape(3)});
  }
  if (mask) {
    has_shape("mask", *mask, {batch, steps});
    if (mask->dtype() != mx::bool_) {
      checks::fail<DtypeError>(op, "mask has dtype ", mask->dtype(), ": expected bool");
    }
  }
  if (lengths) {
    has_shape("lengths", *lengths, {batch});
    if (!mx::issubdtype(lengths->dtype(), mx::integer)) {
      checks::fail<DtypeError>(op, "lengths has dtype ", lengths->dtype(), ": expected an integer type");
    }
  }
  if (!(limits.first <= limits.second)) {
    checks::fail(op, "time_step_limit is (", limits.first, ", ", limits.second,
                 "): expected the least and the greatest time step, in this order");
  }
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"hidden_states", x}, {"B", b}, {"C", c}});
  checks::kernel_dtype(op, {{"A_log", a_log}});
  checks::kernel_dtype(op, {{"D", d}});
  checks::kernel_dtype(op, {{"dt", dt}});
  checks::kernel_dtype(op, {{"dt_bias", dt_bias}});
  Arrays inputs = {
      in_dtype(x, dtype, stream), a_log, in_dtype(b, dtype, stream), in_dtype(c, dtype, stream), d, dt, dt_bias};
  if (state) {
    checks::kernel_dtype(op, {{"state", *state}});
    inputs.push_back(in_dtype(*state, mx::float32, stream));
  }
  const Optional seen = seen_steps(mask, lengths, steps, stream);
  if (seen) {
    inputs.push_back(*seen);
  }
  const mx::Dtype of_x = mx::issubdtype(x.dtype(), mx::floating) ? x.dtype() : dtype;
  return {std::move(inputs),
          {state.has_value(), seen.has_value(), static_cast<float>(limits.first), static_cast<float>(limits.second)},
          mx::promote_types(of_x, d.dtype()),
          state ? state->dtype() : mx::float32};
}

Outputs finished(const Call& call, const Arrays& results, mx::Stream stream) {
  return {in_dtype(results[0], call.y_dtype, stream), in_dtype(results[1], call.state_dtype, stream)};
}

// D x and the first state, where there is nothing to add.
Arrays of_nothing(const StateSpaceArrays& arrays, mx::Stream stream) {
  return {mx::multiply(arrays.x, mx::expand_dims(arrays.d, 1, stream), stream),
          arrays.state ? *arrays.state : mx::zeros(arrays.state_shape(), mx::float32, stream)};
}

// None where mx is ahead, or no kernel covers the call.
std::optional<Outputs> by_kernel(const Call& call, mx::Stream stream) {
  const StateSpaceArrays arrays(call.inputs, call.options);
  if (arrays.x.size() == 0 || arrays.b.size() == 0) {
    return finished(call, of_nothing(arrays, stream), stream);
  }
  const char* why_mx = why_mx_uncorrected(arrays.x.shape(1), stream);
  if (goes_to_mx(op, arrays.x.dtype(), arrays.native_sizes(), why_mx, stream)) {
    return std::nullopt;
  }
  return finished(call, state_space(call.inputs, call.options, stream), stream);
}

std::optional<Outputs> try_ssm_update(const mx::array& x, const mx::array& a_log, const mx::array& b,
                                      const mx::array& c, const mx::array& d, const mx::array& dt,
                                      const mx::array& dt_bias, const Optional& state, const Limits& limits,
                                      const Optional& mask, const Optional& lengths, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  return by_kernel(checked(x, a_log, b, c, d, dt, dt_bias, state, limits, mask, lengths, stream), stream);
}

Outputs ssm_update(const mx::array& x, const mx::array& a_log, const mx::array& b, const mx::array& c,
                   const mx::array& d, const mx::array& dt, const mx::array& dt_bias, const Optional& state,
                   const Limits& limits, const Optional& mask, const Optional& lengths, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const Call call = checked(x, a_log, b, c, d, dt, dt_bias, state, limits, mask, lengths, stream);
  if (auto outputs = by_kernel(call, stream)) {
    return *std::move(outputs);
  }
  return finished(call, state_space_composed(call.inputs, call.options, stream), stream);
}

void bind(nb::module_& module) {
  define(module, op, &try_ssm_update, &ssm_update, "hidden_states"_a, "A_log"_a, "B"_a, "C"_a, "D"_a, "dt"_a,
         "dt_bias"_a, "state"_a.none() = nb::none(), "time_step_limit"_a = Limits(0.001, 100.0),
         "mask"_a.none() = nb::none(), "lengths"_a.none() = nb::none(), nb::kw_only(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
