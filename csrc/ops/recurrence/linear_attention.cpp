#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include "mlx/ops.h"
#include "ops/recurrence/plan.h"
#include "ops/recurrence/recurrence.h"
#include "params/recurrence.h"
#include "python/registry.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/fallback.h"
#include "runtime/gpu.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "linear_attention";

using Decay = std::variant<std::monostate, double, mx::array>;
using Outputs = std::tuple<mx::array, mx::array>;

struct Call {
  Arrays inputs;  // of a recurrence
  RecurrenceOptions options;
  mx::Dtype state_dtype;
};

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

Call checked(const mx::array& q, const mx::array& k, const mx::array& v, const Decay& decay, std::optional<float> scale,
             const std::optional<mx::array>& state, mx::Stream stream) {
  if (q.ndim() != 4) {
    checks::fail(op, "q has shape ", q.shape(), ": expected [batch, steps, key heads, columns]");
  }
  if (k.shape() != q.shape()) {
    checks::fail(op, "k has shape ", k.shape(), ", q has shape ", q.shape(), ": expected the same shape");
  }
  const int key_heads = q.shape(2), columns = q.shape(3);
  if (v.ndim() != 4 || v.shape(0) != q.shape(0) || v.shape(1) != q.shape(1) ||
      (key_heads == 0 ? v.shape(2) != 0 : v.shape(2) % key_heads != 0)) {
    checks::fail(op, "v has shape ", v.shape(), ", q has shape ", q.shape(),
                 ": expected [batch, steps, heads, rows], the heads a multiple of the key heads");
  }
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

// What no step leaves, or a state without columns.
Arrays of_nothing(const Call& call, mx::Stream stream) {
  const mx::array &q = call.inputs[0], &v = call.inputs[2];
  const mx::Shape shape = {v.shape(0), v.shape(2), v.shape(3), q.shape(3)};
  return {mx::zeros_like(v, stream), call.options.has_state ? call.inputs[5] : mx::zeros(shape, mx::float32, stream)};
}

bool mx_is_ahead(const Call& call, mx::Stream stream) {
  const char* reason = why_mx_uncorrected(call.inputs[0].shape(1), stream);
  return reason && prefer_fallback(op, reason);
}

bool is_covered(const Call& call, mx::Stream stream) {
  if (runs_kernels(stream) && call.inputs[0].shape(3) > kMostStateColumns) {
    fall_back(op, "more than " + std::to_string(kMostStateColumns) + " columns");
    return false;
  }
  return !mx_is_ahead(call, stream);
}

Outputs linear_attention(const mx::array& q, const mx::array& k, const mx::array& v, const Decay& decay,
                         std::optional<float> scale, const std::optional<mx::array>& state, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const Call call = checked(q, k, v, decay, scale, state, stream);
  const bool is_empty = call.inputs[0].size() == 0 || call.inputs[2].size() == 0;
  const Arrays all = is_empty                   ? of_nothing(call, stream)
                     : is_covered(call, stream) ? recurrence(call.inputs, call.options, stream)
                                                : recurrence_composed(call.inputs, call.options, stream);
  return {all[0], in_dtype(all[1], call.state_dtype, stream)};
}

void bind(nb::module_& module) {
  bind_function(module, op, &linear_attention, "q"_a, "k"_a, "v"_a, nb::kw_only(), "decay"_a.none() = nb::none(),
                "scale"_a.none() = nb::none(), "state"_a.none() = nb::none(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
