#include <optional>
#include <string>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include "mlx/fast.h"
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

constexpr const char* op = "gated_delta_update";

using Outputs = std::tuple<mx::array, mx::array>;

struct Call {
  Arrays inputs;
  RecurrenceOptions options;
  mx::Dtype state_dtype;
};

Call checked(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& gamma, const mx::array& beta,
             const std::optional<mx::array>& state, const std::optional<mx::array>& mask, mx::Stream stream) {
  if (q.ndim() != 4) {
    checks::fail(op, "q has shape ", q.shape(), ": expected [batch, steps, key heads, columns]");
  }
  if (k.shape() != q.shape()) {
    checks::fail(op, "k has shape ", k.shape(), ", q has shape ", q.shape(), ": expected the same shape");
  }
  const int key_heads = q.shape(2);
  if (v.ndim() != 4 || v.shape(0) != q.shape(0) || v.shape(1) != q.shape(1) ||
      (key_heads == 0 ? v.shape(2) != 0 : v.shape(2) % key_heads != 0)) {
    checks::fail(op, "v has shape ", v.shape(), ", q has shape ", q.shape(),
                 ": expected [batch, steps, heads, rows], the heads a multiple of the key heads");
  }
  const mx::Shape per_head = {v.shape(0), v.shape(1), v.shape(2)};
  mx::Shape per_column = per_head;
  per_column.push_back(q.shape(3));
  if (gamma.shape() != per_head && gamma.shape() != per_column) {
    checks::fail(op, "gamma has shape ", gamma.shape(), ": expected ", per_head, " or ", per_column);
  }
  if (beta.shape() != per_head) {
    checks::fail(op, "beta has shape ", beta.shape(), ": expected ", per_head);
  }
  const mx::Shape of_state = {v.shape(0), v.shape(2), v.shape(3), q.shape(3)};
  if (state && state->shape() != of_state) {
    checks::fail(op, "initial_state has shape ", state->shape(), ": expected ", of_state);
  }
  const mx::Shape of_mask = {q.shape(0), q.shape(1)};
  if (mask && mask->shape() != of_mask) {
    checks::fail(op, "mask has shape ", mask->shape(), ": expected ", of_mask);
  }
  if (mask && mask->dtype() != mx::bool_) {
    checks::fail<DtypeError>(op, "mask has dtype ", mask->dtype(), ": expected bool");
  }
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"q", q}, {"k", k}, {"v", v}});
  checks::kernel_dtype(op, {{"gamma", gamma}});
  checks::kernel_dtype(op, {{"beta", beta}});
  Arrays inputs = {in_dtype(q, dtype, stream), in_dtype(k, dtype, stream), in_dtype(v, dtype, stream),
                   in_dtype(gamma, mx::float32, stream),
                   beta.dtype() == dtype ? beta : in_dtype(beta, mx::float32, stream)};
  if (state) {
    checks::kernel_dtype(op, {{"initial_state", *state}});
    inputs.push_back(in_dtype(*state, mx::float32, stream));
  }
  if (mask) {
    inputs.push_back(*mask);
  }
  return {std::move(inputs),
          {state.has_value(), mask.has_value(), RecurrenceOp::gated_delta_update},
          state ? state->dtype() : mx::float32};
}

// What no step leaves, or a state without columns.
std::optional<Outputs> of_nothing(const Call& call, mx::Stream stream) {
  const mx::array &q = call.inputs[0], &v = call.inputs[2];
  if (q.size() > 0 && v.size() > 0) {
    return std::nullopt;
  }
  const mx::Shape shape = {v.shape(0), v.shape(2), v.shape(3), q.shape(3)};
  return Outputs{mx::zeros_like(v, stream), call.options.has_state ? in_dtype(call.inputs[5], call.state_dtype, stream)
                                                                   : mx::zeros(shape, mx::float32, stream)};
}

bool mlx_is_ahead(const Call& call, mx::Stream stream) {
  const char* reason = why_mx_gated_delta_update(call.inputs[3].ndim() == 3, stream);
  return reason && prefer_fallback(op, reason);
}

std::optional<Outputs> try_gated_delta_update(const mx::array& q, const mx::array& k, const mx::array& v,
                                              const mx::array& gamma, const mx::array& beta,
                                              const std::optional<mx::array>& state,
                                              const std::optional<mx::array>& mask, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  Call call = checked(q, k, v, gamma, beta, state, mask, stream);
  if (auto outputs = of_nothing(call, stream)) {
    return outputs;
  }
  if (runs_kernels(stream) && q.shape(3) > kMostStateColumns) {
    return fallback(op, "more than " + std::to_string(kMostStateColumns) + " columns");
  }
  if (mlx_is_ahead(call, stream)) {
    return std::nullopt;
  }
  const Arrays all = recurrence(std::move(call.inputs), call.options, stream);
  return Outputs{all[0], in_dtype(all[1], call.state_dtype, stream)};
}

Outputs gated_delta_update(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& gamma,
                           const mx::array& beta, const std::optional<mx::array>& state,
                           const std::optional<mx::array>& mask, mx::StreamOrDevice where) {
  if (auto outputs = try_gated_delta_update(q, k, v, gamma, beta, state, mask, where)) {
    return *std::move(outputs);
  }
  const mx::Stream stream = checks::checked_stream(op, where);
  const Call call = checked(q, k, v, gamma, beta, state, mask, stream);
  if (gamma.ndim() == 3) {
    const std::optional<mx::array> wide = state ? std::optional(call.inputs[5]) : std::nullopt;
    const Arrays all = mx::fast::gated_delta_update(call.inputs[0], call.inputs[1], call.inputs[2], call.inputs[3],
                                                    call.inputs[4], wide, mask, stream);
    return {in_dtype(all[0], call.inputs[0].dtype(), stream), in_dtype(all[1], call.state_dtype, stream)};
  }
  const Arrays all = recurrence_composed(call.inputs, call.options, stream);
  return {all[0], in_dtype(all[1], call.state_dtype, stream)};
}

void bind(nb::module_& module) {
  define(module, op, &try_gated_delta_update, &gated_delta_update, "q"_a, "k"_a, "v"_a, "gamma"_a, "beta"_a,
         "initial_state"_a.none() = nb::none(), "mask"_a.none() = nb::none(), nb::kw_only(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
