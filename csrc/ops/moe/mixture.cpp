#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "mlx/ops.h"
#include "ops/matmul/activation.h"
#include "ops/matmul/quantized_weights.h"
#include "ops/matmul/normed_row.h"
#include "ops/moe/gather.h"
#include "ops/moe/mixture_primitive.h"
#include "ops/moe/route.h"
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

constexpr const char* op = "mixture";

// w, scales and, in affine quantization, biases.
using Triple = Arrays;

constexpr const char* triple_names[kAllTriples] = {"gate", "up", "down", "shared_gate", "shared_up", "shared_down"};

struct Call {
  Arrays inputs;
  MixtureParts parts;
};

using MaybeTriple = std::optional<Triple>;
using MaybeArray = std::optional<mx::array>;

// The weights of a call.
struct Weights {
  const Triple& gate;
  const Triple& up;
  const Triple& down;
  const MaybeTriple& shared_gate;
  const MaybeTriple& shared_up;
  const MaybeTriple& shared_down;
  const MaybeArray& shared_logits;
  const MaybeArray& router_bias;
  const std::optional<std::vector<mx::array>>& bias;
};

void check_shapes(const Arrays& arrays, bool has_shared) {
  const auto w = [&](int triple) -> const mx::array& { return arrays[3 * static_cast<size_t>(triple)]; };
  for (int i : {kGate, kDown}) {
    if (w(i).ndim() != 3) {
      checks::fail(op, triple_names[i], "'s w has shape ", w(i).shape(), ": expected [experts, outputs, words]");
    }
  }
  const auto check = [&](int i, const mx::Shape& shape) {
    if (w(i).shape() != shape) {
      checks::fail(op, triple_names[i], "'s w has shape ", w(i).shape(), ": expected ", shape);
    }
  };
  const auto of_one = [&](int i) { return mx::Shape(w(i).shape().begin() + 1, w(i).shape().end()); };
  check(kUp, w(kGate).shape());
  if (has_shared) {
    check(kSharedGate, of_one(kGate));
    check(kSharedUp, of_one(kGate));
    check(kSharedDown, of_one(kDown));
  }
  if (w(kDown).shape(0) != w(kGate).shape(0)) {
    checks::fail(op, "down has ", w(kDown).shape(0), " experts, gate has ", w(kGate).shape(0),
                 ": expected the same number");
  }
}

Call checked(const mx::array& x, const mx::array& logits, const RouteOptions& choice, const Weights& given,
             std::optional<int> group_size, std::optional<int> bits, const std::string& mode,
             const std::string& activation, mx::Stream stream) {
  const QuantizedFormat format = quantized_format(op, group_size, bits, true, mode);
  const Activation& known = activation_of(op, activation, true);
  if (x.ndim() < 1) {
    checks::fail(op, "x has no dimensions: expected at least one");
  }
  const mx::Shape tokens(x.shape().begin(), x.shape().end() - 1);
  if (logits.ndim() != x.ndim() || !std::equal(tokens.begin(), tokens.end(), logits.shape().begin())) {
    checks::fail(op, "logits has shape ", logits.shape(), ", x has shape ", x.shape(),
                 ": expected those of each token of x");
  }
  const bool has_shared = given.shared_gate.has_value();
  if (given.shared_up.has_value() != has_shared || given.shared_down.has_value() != has_shared ||
      given.shared_logits.has_value() != has_shared) {
    checks::fail(op, "shared_gate, shared_up, shared_down and shared_logits are not all there: expected all or none");
  }
  std::vector<const Triple*> triples = {&given.gate, &given.up, &given.down};
  if (has_shared) {
    triples.insert(triples.end(), {&*given.shared_gate, &*given.shared_up, &*given.shared_down});
    mx::Shape one = tokens;
    one.push_back(1);
    const mx::Shape& shape = given.shared_logits->shape();
    if (shape != tokens && shape != one) {
      checks::fail(op, "shared_logits has shape ", shape, ": expected ", tokens, " or ", one);
    }
    checks::floating(op, {{"shared_logits", *given.shared_logits}});
  }
  const bool affine = format.has_biases();
  Arrays arrays;
  for (size_t i = 0; i < triples.size(); ++i) {
    const Triple& triple = *triples[i];
    check_triple_size(op, triple_names[i], triple, format);
    arrays.insert(arrays.end(), {triple[0], triple[1], triple[affine ? 2 : 1]});
  }
  check_shapes(arrays, has_shared);
  for (size_t i = 0; i < triples.size(); ++i) {
    const bool is_down = i == kDown || i == kSharedDown;
    check_quantized(op, is_down ? arrays[0].shape(1) : x.shape(-1), arrays[3 * i], arrays[3 * i + 1],
                    affine ? std::optional(arrays[3 * i + 2]) : std::nullopt, format);
  }
  const int experts = arrays[0].shape(0);
  if (logits.shape(-1) != experts) {
    checks::fail(op, "logits has ", logits.shape(-1), " columns, gate has ", experts,
                 " experts: expected a logit for each");
  }
  const Routing routing = checked_routing(op, experts, "router_bias", given.router_bias, choice);
  if (given.bias && given.bias->size() != kBiases) {
    checks::fail(op, "bias has ", given.bias->size(), " arrays: expected those of gate, up and down");
  }
  checks::floating(op, {{"logits", logits}});
  mx::Dtype dtype =
      affine ? checks::kernel_dtype(op, {{"x", x}, {"scales", arrays[1]}}) : checks::kernel_dtype(op, {{"x", x}});
  for (size_t i = 0; given.bias && i < kBiases; ++i) {
    const mx::array& bias = (*given.bias)[i];
    check_bias_of_experts(op, (std::string(triple_names[i]) + "'s bias").c_str(), bias, arrays[3 * i]);
    dtype = mx::promote_types(dtype, checks::kernel_dtype(op, {{"x", x}, {"bias", bias}}));
  }
  const auto typed = [&](const mx::array& a) { return in_dtype(a, dtype, stream); };
  Arrays inputs = {typed(x), typed(logits)};
  for (size_t i = 0; i < arrays.size(); ++i) {
    inputs.push_back(affine && i % 3 != 0 ? typed(arrays[i]) : arrays[i]);
  }
  if (has_shared) {
    const mx::array& shared = *given.shared_logits;
    inputs.push_back(typed(shared.shape() == tokens ? shared : mx::squeeze(shared, -1, stream)));
  }
  for (size_t i = 0; given.bias && i < kBiases; ++i) {
    inputs.push_back(typed((*given.bias)[i]));
  }
  if (given.router_bias) {
    checks::kernel_dtype(op, {{"router_bias", *given.router_bias}});
    inputs.push_back(in_dtype(*given.router_bias, mx::float32, stream));
  }
  return {std::move(inputs),
          {format, known, routing, has_shared, given.bias.has_value(), given.router_bias.has_value()}};
}

// Formats and numbers of experts that have kernels, where mx is not known to be ahead.
bool goes_to_kernels(const Call& call, mx::Stream stream) {
  if (is_switched_off(op)) {
    return false;
  }
  const MixtureParts& parts = call.parts;
  const mx::array& x = call.inputs[0];
  const mx::array& gate = call.inputs[MixtureParts::triple(kGate)];
  const size_t tokens = leading_size(x, 1), pairs = tokens * static_cast<size_t>(parts.routing.k);
  const ExpertSizes sizes{pairs, leading_size(gate, 2), static_cast<size_t>(x.shape(-1)),
                          static_cast<size_t>(gate.shape(-2))};
  return runs_kernels(stream) && has_common_kernels(parts.format) && parts.places() <= kMostSummed &&
         has_route_kernel(gate.shape(0), parts.routing, stream) && x.size() > 0 && gate.size() > 0 &&
         call.inputs[MixtureParts::triple(kDown)].size() > 0 && !why_not_launched(tokens * parts.places(), 1, stream) &&
         !prefer_mx_experts(experts_problem(op, x.dtype(), format_number(parts.format), false, sizes), 0, stream);
}

// The call on kernels. If x is a norm whose row another product has taken in, this does too.
mx::array launched(const Call& call, const mx::array& x, mx::Stream stream) {
  MixtureParts parts = call.parts;
  Arrays inputs = call.inputs;
  const bool may_take = inputs[0].id() == x.id() && shares_norm(stream);
  if (const auto row = may_take ? handed_on_row(x, stream) : std::nullopt) {
    parts.row = row->norm;
    inputs[0] = row->scaled;
    inputs.push_back(row->squares);
  }
  return mixture_by_kernels(parts, std::move(inputs), stream);
}

mx::array mixture(const mx::array& x, const mx::array& logits, int k, const Triple& gate, const Triple& up,
                  const Triple& down, const MaybeTriple& shared_gate, const MaybeTriple& shared_up,
                  const MaybeTriple& shared_down, const MaybeArray& shared_logits, std::optional<int> group_size,
                  std::optional<int> bits, const std::string& mode, const MaybeArray& router_bias,
                  const std::string& scores, bool renormalize, bool descending, float scale, bool precise, float eps,
                  std::optional<std::pair<int, int>> groups, float dropped,
                  const std::optional<std::vector<mx::array>>& bias, const std::string& activation,
                  mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const Call call = checked(x, logits, {k, scores, renormalize, descending, scale, precise, eps, groups, dropped},
                            {gate, up, down, shared_gate, shared_up, shared_down, shared_logits, router_bias, bias},
                            group_size, bits, mode, activation, stream);
  if (goes_to_kernels(call, stream)) {
    return launched(call, x, stream);
  }
  return mixture_of_parts(call.parts, call.inputs, stream);
}

// For the patch, which has its own parts: nothing where they are as good.
std::optional<mx::array> try_mixture(const mx::array& x, const mx::array& logits, int k, const Triple& gate,
                                     const Triple& up, const Triple& down, const MaybeTriple& shared_gate,
                                     const MaybeTriple& shared_up, const MaybeTriple& shared_down,
                                     const MaybeArray& shared_logits, std::optional<int> group_size,
                                     std::optional<int> bits, const std::string& mode, const MaybeArray& router_bias,
                                     const std::string& scores, bool renormalize, bool descending, float scale,
                                     bool precise, float eps, std::optional<std::pair<int, int>> groups, float dropped,
                                     const std::optional<std::vector<mx::array>>& bias, const std::string& activation,
                                     mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const Call call = checked(x, logits, {k, scores, renormalize, descending, scale, precise, eps, groups, dropped},
                            {gate, up, down, shared_gate, shared_up, shared_down, shared_logits, router_bias, bias},
                            group_size, bits, mode, activation, stream);
  const bool is_one = leading_size(call.inputs[0], 1) == 1 && chooses_in_experts(stream);
  if (!is_one || !goes_to_kernels(call, stream)) {
    return std::nullopt;
  }
  return launched(call, x, stream);
}

void bind(nb::module_& module) {
  define(module, op, &try_mixture, &mixture, "x"_a, "logits"_a, "k"_a, "gate"_a, "up"_a, "down"_a,
         "shared_gate"_a.none() = nb::none(), "shared_up"_a.none() = nb::none(), "shared_down"_a.none() = nb::none(),
         "shared_logits"_a.none() = nb::none(), "group_size"_a.none() = nb::none(), "bits"_a.none() = nb::none(),
         "mode"_a = "affine", nb::kw_only(), "router_bias"_a.none() = nb::none(), "scores"_a = "softmax",
         "renormalize"_a = false, "descending"_a = true, "scale"_a = 1.0f, "precise"_a = false, "eps"_a = 1e-20,
         "groups"_a.none() = nb::none(), "dropped"_a = 0.0f, "bias"_a.none() = nb::none(), "activation"_a = "swiglu",
         "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
