#include <optional>
#include <tuple>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include "mlx/ops.h"
#include "ops/recurrence/plan.h"
#include "ops/recurrence/recurrence.h"
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
  const mx::array position = mx::arange(0, steps, lengths->dtype(), stream);
  const mx::array within = mx::less(position, mx::expand_dims(*lengths, 1, stream), stream);
  return mask ? mx::logical_and(*mask, within, stream) : within;
}

RecurrenceCall checked(const mx::array& x, const mx::array& a_log, const mx::array& b, const mx::array& c,
                       const mx::array& d, const mx::array& dt, const mx::array& dt_bias, const Optional& state,
                       const Limits& limits, const Optional& mask, const Optional& lengths, mx::Stream stream) {
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
  mx::array step = mx::add(in_dtype(dt, mx::float32, stream), in_dtype(dt_bias, mx::float32, stream), stream);
  step = mx::logaddexp(step, mx::array(0.0f), stream);
  step =
      mx::clip(step, mx::array(static_cast<float>(limits.first)), mx::array(static_cast<float>(limits.second)), stream);
  const mx::array rate = mx::exp(in_dtype(a_log, mx::float32, stream), stream);
  const mx::array decay = mx::exp(mx::negative(mx::multiply(step, rate, stream), stream), stream);
  Arrays inputs = {in_dtype(c, dtype, stream), in_dtype(b, dtype, stream), in_dtype(x, dtype, stream), decay, step};
  if (state) {
    checks::kernel_dtype(op, {{"state", *state}});
    inputs.push_back(in_dtype(*state, mx::float32, stream));
  }
  const Optional seen = seen_steps(mask, lengths, steps, stream);
  if (seen) {
    inputs.push_back(*seen);
  }
  return {std::move(inputs),
          {state.has_value(), seen.has_value(), RecurrenceOp::ssm_update},
          state ? state->dtype() : mx::float32};
}

// y with what D lets through.
Outputs finished(const RecurrenceCall& call, const Arrays& results, const mx::array& x, const mx::array& d,
                 mx::Stream stream) {
  const mx::array skipped = mx::multiply(x, mx::expand_dims(d, 1, stream), stream);
  const mx::Dtype dtype = mx::issubdtype(x.dtype(), mx::floating) ? x.dtype() : results[0].dtype();
  return {mx::add(in_dtype(results[0], dtype, stream), skipped, stream),
          in_dtype(results[1], call.state_dtype, stream)};
}

// None where mx is ahead, or no kernel covers the call.
std::optional<Outputs> by_kernel(const RecurrenceCall& call, const mx::array& x, const mx::array& d,
                                 mx::Stream stream) {
  const std::optional<Arrays> all = try_recurrence(op, call, why_mx_uncorrected(x.shape(1), stream), stream);
  return all ? std::optional(finished(call, *all, x, d, stream)) : std::nullopt;
}

std::optional<Outputs> try_ssm_update(const mx::array& x, const mx::array& a_log, const mx::array& b,
                                      const mx::array& c, const mx::array& d, const mx::array& dt,
                                      const mx::array& dt_bias, const Optional& state, const Limits& limits,
                                      const Optional& mask, const Optional& lengths, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  return by_kernel(checked(x, a_log, b, c, d, dt, dt_bias, state, limits, mask, lengths, stream), x, d, stream);
}

Outputs ssm_update(const mx::array& x, const mx::array& a_log, const mx::array& b, const mx::array& c,
                   const mx::array& d, const mx::array& dt, const mx::array& dt_bias, const Optional& state,
                   const Limits& limits, const Optional& mask, const Optional& lengths, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const RecurrenceCall call = checked(x, a_log, b, c, d, dt, dt_bias, state, limits, mask, lengths, stream);
  if (auto outputs = by_kernel(call, x, d, stream)) {
    return *std::move(outputs);
  }
  return finished(call, recurrence_composed(call.inputs, call.options, stream), x, d, stream);
}

void bind(nb::module_& module) {
  define(module, op, &try_ssm_update, &ssm_update, "hidden_states"_a, "A_log"_a, "B"_a, "C"_a, "D"_a, "dt"_a,
         "dt_bias"_a, "state"_a.none() = nb::none(), "time_step_limit"_a = Limits(0.001, 100.0),
         "mask"_a.none() = nb::none(), "lengths"_a.none() = nb::none(), nb::kw_only(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
