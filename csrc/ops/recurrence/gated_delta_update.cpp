#include <optional>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include "mlx/fast.h"
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

constexpr const char* op = "gated_delta_update";

using Outputs = std::tuple<mx::array, mx::array>;

struct Call {
  Arrays inputs;  // as of recurrence()
  RecurrenceOptions options;
  mx::Dtype state_dtype;  // of the last state that the caller gets
  bool one_dtype;  // whether gamma and beta have the type of q, k and v, to which MLX's op would round them
};

Call checked(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& gamma, const mx::array& beta,
             const std::optional<mx::array>& state, const std::optional<mx::array>& mask, mx::Stream stream) {
  check_queries_keys_values(op, q, k, v);
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
          {state.has_value(), mask.has_value(), true},
          state ? state->dtype() : mx::float32,
          gamma.dtype() == dtype && beta.dtype() == dtype};
}

// None where the peer is ahead, or no kernel covers the call.
std::optional<Outputs> by_kernel(const Call& call, GatedDeltaPeer peer, mx::Stream stream) {
  const RecurrenceArrays arrays(call.inputs, call.options);
  if (arrays.q.size() == 0 || arrays.v.size() == 0) {
    const mx::Shape of_state = {arrays.v.shape(0), arrays.v.shape(2), arrays.v.shape(3), arrays.q.shape(3)};
    const mx::array state = arrays.state ? *arrays.state : mx::zeros(of_state, mx::float32, stream);
    return Outputs{mx::zeros_like(arrays.v, stream), in_dtype(state, call.state_dtype, stream)};
  }
  const cpu::Recurrence sizes = arrays.native_sizes();
  const char* why_mx = why_mx_gated_delta_update(peer, sizes, arrays.mask != nullptr, stream);
  if (goes_to_mx(op, arrays.q.dtype(), sizes, why_mx, stream)) {
    return std::nullopt;
  }
  const Arrays all = recurrence(call.inputs, call.options, stream);
  return Outputs{all[0], in_dtype(all[1], call.state_dtype, stream)};
}

template <GatedDeltaPeer peer>
std::optional<Outputs> try_gated_delta_update(const mx::array& q, const mx::array& k, const mx::array& v,
                                              const mx::array& gamma, const mx::array& beta,
                                              const std::optional<mx::array>& state,
                                              const std::optional<mx::array>& mask, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  return by_kernel(checked(q, k, v, gamma, beta, state, mask, stream), peer, stream);
}

Outputs gated_delta_update(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& gamma,
                           const mx::array& beta, const std::optional<mx::array>& state,
                           const std::optional<mx::array>& mask, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const Call call = checked(q, k, v, gamma, beta, state, mask, stream);
  const bool as_mlx = MITTENS_MLX_HAS_GATED_DELTA_UPDATE && gamma.ndim() == 3 && call.one_dtype;
  if (auto outputs = by_kernel(call, as_mlx ? GatedDeltaPeer::op : GatedDeltaPeer::operations, stream)) {
    return *std::move(outputs);
  }
#if MITTENS_MLX_HAS_GATED_DELTA_UPDATE
  if (as_mlx) {
    const std::optional<mx::array> wide = state ? std::optional(call.inputs[5]) : std::nullopt;
    const Arrays all = mx::fast::gated_delta_update(call.inputs[0], call.inputs[1], call.inputs[2], call.inputs[3],
                                                    call.inputs[4], wide, mask, stream);
    return {in_dtype(all[0], call.inputs[0].dtype(), stream), in_dtype(all[1], call.state_dtype, stream)};
  }
#endif
  const Arrays all = recurrence_composed(call.inputs, call.options, stream);
  return {in_dtype(all[0], call.inputs[0].dtype(), stream), in_dtype(all[1], call.state_dtype, stream)};
}

void bind(nb::module_& module) {
  define(module, op, &try_gated_delta_update<GatedDeltaPeer::op>, &gated_delta_update, "q"_a, "k"_a, "v"_a, "gamma"_a,
         "beta"_a, "initial_state"_a.none() = nb::none(), "mask"_a.none() = nb::none(), nb::kw_only(),
         "stream"_a = nb::none());
  // In the place of mlx-lm's functions.
  const auto attempt = [&](const char* name, auto function) {
    module.def(name, lenient(op, function, &gated_delta_update), "q"_a, "k"_a, "v"_a, "g"_a, "beta"_a,
               "state"_a.none() = nb::none(), "mask"_a.none() = nb::none(), "stream"_a = nb::none());
  };
  attempt("try_gated_delta_kernel", &try_gated_delta_update<GatedDeltaPeer::kernel>);
  attempt("try_gated_delta_ops", &try_gated_delta_update<GatedDeltaPeer::operations>);
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
