#include <cmath>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

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

constexpr const char* op = "linear_attention";

using Decay = std::variant<std::monostate, double, mx::array>;
using Outputs = std::tuple<mx::array, mx::array>;

// What a head's state is multiplied by in a step, for [batch, steps, heads].
mx::array gates_of(const Decay& decay, const mx::Shape& per_head, mx::Stream stream) {
  if (const mx::array* of_heads = std::get_if<mx::array>(&decay)) {
    if (of_heads->shape() != mx::Shape{per_head[2]}) {
      checks::fail(op, "decay has shape ", of_heads->shape(), ": expected a number or ", mx::Shape{per_head[2]});
    }
    checks::kernel_dtype(op, {{"decay", *of_heads}});
    return mx::broadcast_to(in_dtype(*of_heads, mx::float32, stream), per_head, stream);
  }
  const double* number = std::get_if<double>(&decay);
  if (number && !(*number > 0 && *number <= 1)) {
    checks::fail(op, "decay is ", *number, ": expected more than 0, and at most 1");
  }
  return mx::full(per_head, number ? static_cast<float>(*number) : 1.0f, mx::float32, stream);
}

RecurrenceCall checked(const mx::array& q, const mx::array& k, const mx::array& v, const Decay& decay,
                       std::optional<float> scale, const std::optional<mx::array>& state, mx::Stream stream) {
  check_queries_keys_values(op, q, k, v);
  const int columns = q.shape(3);
  const mx::Shape of_state = {v.shape(0), v.shape(2), v.shape(3), columns};
  if (state && state->shape() != of_state) {
    checks::fail(op, "state has shape ", state->shape(), ": expected ", of_state);
  }
  if (scale && !std::isfinite(*scale)) {
    checks::fail(op, "scale is ", *scale, ": expected a finite number");
  }
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"q", q}, {"k", k}, {"v", v}});
  const mx::Shape per_head = {v.shape(0), v.shape(1), v.shape(2)};
  const mx::array gates = gates_of(decay, per_head, stream);
  const float factor = scale.value_or(columns == 0 ? 1.0f : 1 / std::sqrt(static_cast<float>(columns)));
  mx::array queries = in_dtype(q, dtype, stream);
  if (factor != 1) {
    queries = mx::multiply(queries, mx::array(factor, dtype), stream);
  }
  Arrays inputs = {queries, in_dtype(k, dtype, stream), in_dtype(v, dtype, stream), gates,
                   mx::ones(per_head, dtype, stream)};
  if (state) {
    checks::kernel_dtype(op, {{"state", *state}});
    inputs.push_back(in_dtype(*state, mx::float32, stream));
  }
  return {std::move(inputs),
          {state.has_value(), false, RecurrenceOp::linear_attention},
          state ? state->dtype() : mx::float32};
}

Outputs linear_attention(const mx::array& q, const mx::array& k, const mx::array& v, const Decay& decay,
                         std::optional<float> scale, const std::optional<mx::array>& state, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const RecurrenceCall call = checked(q, k, v, decay, scale, state, stream);
  const std::optional<Arrays> made = try_recurrence(op, call, why_mx_uncorrected(q.shape(1), stream), stream);
  const Arrays all = made ? *made : recurrence_composed(call.inputs, call.options, stream);
  return {all[0], in_dtype(all[1], call.state_dtype, stream)};
}

void bind(nb::module_& module) {
  bind_function(module, op, &linear_attention, "q"_a, "k"_a, "v"_a, nb::kw_only(), "decay"_a.none() = nb::none(),
                "scale"_a.none() = nb::none(), "state"_a.none() = nb::none(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
