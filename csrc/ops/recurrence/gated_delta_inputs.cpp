#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include "mlx/ops.h"
#include "ops/recurrence/convolved.h"
#include "ops/recurrence/layer_inputs.h"
#include "ops/recurrence/token_layer.h"
#include "python/registry.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "gated_delta_inputs";

using Optional = std::optional<mx::array>;
// q, k, v, gates, rates and the convolution's next state.
using Outputs = std::tuple<mx::array, mx::array, mx::array, mx::array, mx::array, Convolved>;

Outputs gated_delta_inputs(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& a,
                           const mx::array& b, const std::optional<Convolved>& conv_state, const Convolved& conv_weight,
                           const mx::array& a_log, const mx::array& dt_bias, const Optional& mask,
                           const Optional& lengths, float key_eps, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  if (q.ndim() != 4) {
    checks::fail(op, "q has shape ", q.shape(), ": expected [batch, steps, key heads, columns]");
  }
  check_shape(op, "k", k, q.shape());
  if (v.ndim() != 5 || v.shape(0) != q.shape(0) || v.shape(1) != q.shape(1) || v.shape(2) != q.shape(2)) {
    checks::fail(op, "v has shape ", v.shape(), ", q has shape ", q.shape(),
                 ": expected [batch, steps, key heads, heads of each, rows]");
  }
  const int batch = q.shape(0), steps = q.shape(1), columns = q.shape(3), heads = v.shape(2) * v.shape(3);
  const mx::Shape per_head(v.shape().begin(), v.shape().end() - 1);
  mx::Shape of_gates = per_head, of_biases = {heads};
  if (a.ndim() == 5) {
    of_gates.push_back(columns);
    of_biases.push_back(columns);
  }
  check_shape(op, "a", a, of_gates);
  check_shape(op, "b", b, per_head);
  const int of_keys = q.shape(2) * columns, of_values = heads * v.shape(4);
  Arrays weights = arrays_of(conv_weight), states = conv_state ? arrays_of(*conv_state) : Arrays();
  const size_t parts = weights.size();
  if (conv_state && states.size() != parts) {
    checks::fail(op, "conv_state has ", states.size(), " parts, conv_weight has ", parts, ": expected the same number");
  }
  for (size_t i = 0; i < parts; ++i) {
    const int channels = parts == 1 ? 2 * of_keys + of_values : i == 2 ? of_values : of_keys;
    const std::string of_weight = name_of_part("conv_weight", i, parts);
    checks::kernel_dtype(op, {{of_weight.c_str(), weights[i]}});
    weights[i] = taps_of_channels(op, weights[i], channels, stream, of_weight.c_str());
    if (weights[i].shape(1) != weights[0].shape(1)) {
      checks::fail(op, "conv_weight has ", weights[0].shape(1), " and ", weights[i].shape(1),
                   " taps: expected the same number in all parts");
    }
    if (conv_state) {
      const std::string of_state = name_of_part("conv_state", i, parts);
      check_shape(op, of_state.c_str(), states[i], {batch, weights[0].shape(1) - 1, channels});
      checks::kernel_dtype(op, {{of_state.c_str(), states[i]}});
    }
  }
  check_shape(op, "A_log", a_log, {heads});
  check_shape(op, "dt_bias", dt_bias, of_biases);
  checks::epsilon(op, key_eps);
  check_steps(op, mask, lengths, batch, steps);
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"q", q}, {"k", k}, {"v", v}, {"a", a}, {"b", b}});
  checks::kernel_dtype(op, {{"A_log", a_log}});
  checks::kernel_dtype(op, {{"dt_bias", dt_bias}});
  Arrays inputs;
  const auto add = [&](const mx::array& array) { inputs.push_back(in_dtype(array, dtype, stream)); };
  for (const mx::array* array : {&q, &k, &v}) {
    add(*array);
  }
  for (const Arrays* arrays : {&states, &weights}) {
    for (const mx::array& array : *arrays) {
      add(array);
    }
  }
  add(a);
  add(b);
  inputs.insert(inputs.end(), {a_log, dt_bias});
  add_steps(inputs, mask, lengths, steps, stream);
  const LayerInputsOptions options = {3, states.size(), parts, false, true, mask.has_value(), lengths.has_value(),
                                      0, key_eps};
  const Arrays all = layer_inputs(op, std::move(inputs), options, stream);
  Arrays next = {all[3]};
  if (parts == 3) {
    next = mx::split(all[3], mx::Shape{of_keys, 2 * of_keys}, 2, stream);
  }
  for (size_t i = 0; i < states.size(); ++i) {
    next[i] = in_dtype(next[i], states[i].dtype(), stream);
  }
  return {all[0], all[1], all[2], all[4], all[5], convolved_of(next)};
}

void bind(nb::module_& module) {
  bind_function(module, op, &gated_delta_inputs, "q"_a, "k"_a, "v"_a, "a"_a, "b"_a, "conv_state"_a.none(),
                "conv_weight"_a, "A_log"_a, "dt_bias"_a, "mask"_a.none() = nb::none(), "lengths"_a.none() = nb::none(),
                nb::kw_only(), "key_eps"_a = 1e-6, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
