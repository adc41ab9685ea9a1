#include <cmath>
#include <functional>
#include <limits>
#include <optional>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "ops/moe/plan.h"
#include "ops/moe/route.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/calibration.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "route_top_k";
const Name file = "moe/route_top_k.metal";
static_assert(int(cpu::Scores::softmax) == kScoresSoftmax && int(cpu::Scores::sigmoid) == kScoresSigmoid &&
              int(cpu::Scores::chosen) == kScoresChosen && int(cpu::Scores::sqrtsoftplus) == kScoresSqrtSoftplus);

using Outputs = std::tuple<mx::array, mx::array>;

// Replaces the keys of dropped groups: the groups whose two largest keys have the least sums.
mx::array of_kept_groups(const mx::array& keys, const Routing& routing, mx::Stream stream) {
  const int count = routing.groups - routing.kept;
  if (count == 0) {
    return keys;
  }
  const mx::array groups = mx::unflatten(keys, -1, {routing.groups, -1}, stream);
  const mx::array sums = mx::sum(mx::topk(groups, 2, -1, stream), -1, true, stream);
  // The place of each group among the sorted ones.
  const mx::array places = mx::argsort(mx::argsort(sums, -2, stream), -2, stream);
  const mx::array kept = mx::greater_equal(places, mx::array(count, mx::uint32), stream);
  return mx::flatten(mx::where(kept, groups, mx::array(routing.dropped), stream), -2, -1, stream);
}

// The same of mx operations, in float32.
Arrays composition_of(const mx::array& logits, const std::optional<mx::array>& bias, const Routing& routing,
                      mx::Stream stream) {
  const mx::array wide = in_dtype(logits, mx::float32, stream);
  mx::array scores = wide;
  if (routing.scores == cpu::Scores::softmax) {
    scores = mx::softmax(wide, -1, true, stream);
  } else if (routing.scores == cpu::Scores::sigmoid) {
    scores = mx::sigmoid(wide, stream);
  } else if (routing.scores == cpu::Scores::sqrtsoftplus) {
    scores = mx::sqrt(mx::logaddexp(wide, mx::array(0.0f), stream), stream);
  }
  const mx::Dtype of_keys = routing.precise ? mx::float32 : logits.dtype();
  mx::array keys = in_dtype(in_dtype(scores, of_keys, stream), mx::float32, stream);
  const int experts = logits.shape(-1);
  keys = mx::stop_gradient(of_kept_groups(bias ? mx::add(keys, *bias, stream) : keys, routing, stream), stream);
  const mx::array order = mx::argsort(routing.descending ? mx::negative(keys, stream) : keys, -1, stream);
  mx::Shape start(logits.ndim(), 0), stop = logits.shape();
  (routing.descending ? stop : start).back() = routing.descending ? routing.k : experts - routing.k;
  const mx::array indices = mx::slice(order, start, stop, stream);
  mx::array weights = mx::take_along_axis(scores, indices, -1, stream);
  if (routing.scores == cpu::Scores::chosen) {
    weights = mx::softmax(weights, -1, true, stream);
  } else if (routing.renormalize) {
    const mx::array sum = mx::add(mx::sum(weights, -1, true, stream), mx::array(routing.eps), stream);
    weights = mx::divide(weights, sum, stream);
  }
  if (routing.scale != 1) {
    weights = mx::multiply(weights, mx::array(routing.scale), stream);
  }
  return {indices, in_dtype(weights, logits.dtype(), stream)};
}

// logits [.., experts], bias [experts] in float32, if there is one -> indices and weights [.., k].
class RouteTopK : public KernelPrimitive {
 public:
  RouteTopK(mx::Stream stream, Routing routing) : KernelPrimitive(stream), routing_(routing) {}

  static Outputs apply(Arrays inputs, const Routing& routing, mx::Stream stream) {
    auto primitive = std::make_shared<RouteTopK>(stream, routing);
    std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
    const mx::Dtype dtype = inputs[0].dtype();
    const Arrays made = mx::array::make_arrays(std::move(shapes), {mx::uint32, dtype}, primitive, inputs);
    return {made[0], made[1]};
  }

  const char* name() const override {
    return "MittensRouteTopK";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return routing_ == static_cast<const RouteTopK&>(other).routing_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    if (shape.back() < routing_.k) {
      checks::fail(op, "k is ", routing_.k, ", logits have shape ", shape, ": expected at least as many experts");
    }
    shape.back() = routing_.k;
    return {shape, shape};
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override {
    // Of the weights alone: indices have no derivative.
    auto weights = [&](const Arrays& these) {
      Arrays inputs = primals;
      for (size_t i = 0; i < argnums.size(); ++i) {
        inputs[argnums[i]] = these[i];
      }
      return Arrays{composed(inputs)[1]};
    };
    Arrays arguments;
    for (int argument : argnums) {
      arguments.push_back(primals[argument]);
    }
    if (cotangents[1].size() == 0) {
      for (mx::array& argument : arguments) {
        argument = mx::zeros_like(argument, stream());
      }
      return arguments;
    }
    return mx::vjp(weights, arguments, {cotangents[1]}).second;
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    const int size = axes[0] >= 0 ? inputs[0].shape(axes[0]) : inputs[1].shape(axes[1]);
    mx::array logits = axes[0] >= 0 ? mx::moveaxis(inputs[0], axes[0], 0, stream()) : inputs[0];
    if (axes[0] < 0) {
      mx::Shape shape = logits.shape();
      shape.insert(shape.begin(), size);
      logits = mx::broadcast_to(logits, shape, stream());
    }
    if (inputs.size() < 2 || axes[1] < 0) {
      Arrays moved = inputs;
      moved[0] = logits;
      const auto [indices, weights] = apply(std::move(moved), routing_, stream());
      return {{indices, weights}, {0, 0}};
    }
    // A bias for each.
    mx::Shape shape(logits.ndim(), 1);
    shape.front() = size;
    shape.back() = logits.shape(-1);
    const mx::array bias = mx::reshape(mx::moveaxis(inputs[1], axes[1], 0, stream()), shape, stream());
    return {composition_of(logits, bias, routing_, stream()), {0, 0}};
  }

 protected:
  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& logits = inputs[0];
    const int experts = logits.shape(-1);
    if (!has_route_kernel(experts, routing_, stream())) {
      if (stream().device == mx::Device::gpu) {
        checks::fail<std::logic_error>(op, "has no kernel for ", experts, " experts");
      }
      mx::cpu::get_command_encoder(stream()).dispatch(native(inputs, outputs));
      return {};
    }
    const bool has_bias = inputs.size() > 1;
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(logits.dtype(), op);
    launch.threadgroups = {static_cast<uint32_t>(leading_size(logits, 1)), 1, 1};
    launch.threads = {32, 1, 1};
    launch.input(logits).input_if(has_bias, has_bias ? inputs[1] : logits);
    return in_order(launch.output(outputs[0]).output(outputs[1]).params(route_params(routing_, experts, has_bias)));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    return [type = native_type(inputs[0].dtype()),
            route = cpu::Route{routing_.scores, routing_.renormalize, routing_.descending, routing_.scale,
                               routing_.precise, routing_.eps, routing_.groups, routing_.kept, routing_.dropped},
            logits = data_of(inputs[0]), bias = inputs.size() > 1 ? inputs[1].data<float>() : nullptr,
            indices = outputs[0].data<uint32_t>(), weights = data_of(outputs[1]), rows = leading_size(inputs[0], 1),
            experts = static_cast<size_t>(inputs[0].shape(-1)), k = static_cast<size_t>(routing_.k)] {
      cpu::route_top_k(type, route, logits, bias, indices, weights, rows, experts, k);
    };
  }

  Arrays composed(const Arrays& inputs) override {
    return composition_of(inputs[0], inputs.size() > 1 ? std::optional(inputs[1]) : std::nullopt, routing_, stream());
  }

 private:
  Routing routing_;
};

cpu::Scores scores_of(const char* op, const std::string& scores) {
  if (scores == "softmax") {
    return cpu::Scores::softmax;
  }
  if (scores == "sigmoid") {
    return cpu::Scores::sigmoid;
  }
  if (scores == "chosen") {
    return cpu::Scores::chosen;
  }
  if (scores == "sqrtsoftplus") {
    return cpu::Scores::sqrtsoftplus;
  }
  checks::fail(op, "scores is '", scores, "': expected softmax, sigmoid, chosen or sqrtsoftplus");
}

}  // namespace

Routing checked_routing(const char* op, int experts, const char* bias_name, const std::optional<mx::array>& bias,
                        const RouteOptions& choice) {
  if (choice.k < 1 || choice.k > experts) {
    checks::fail(op, "k is ", choice.k, ", logits has ", experts,
                 " columns: expected 1 to as many as there are experts");
  }
  if (bias && (bias->ndim() != 1 || bias->shape(0) != experts)) {
    checks::fail(op, bias_name, " has shape ", bias->shape(), ": expected one dimension with ", experts, " elements");
  }
  if (!std::isfinite(choice.scale)) {
    checks::fail(op, "scale is ", choice.scale, ": expected a finite number");
  }
  if (!std::isfinite(choice.eps) || choice.eps < 0) {
    checks::fail(op, "eps is ", choice.eps, ": expected a finite number that is not negative");
  }
  const auto [groups, kept] = choice.groups.value_or(std::pair(1, 1));
  if (groups < 1 || kept < 1 || kept > groups) {
    checks::fail(op, "groups are ", groups, ", with ", kept,
                 " kept: expected at least one, and not more than there are");
  }
  if (groups > 1 && (experts % groups != 0 || experts / groups < 2)) {
    checks::fail(op, "logits has ", experts, " columns, there are ", groups,
                 " groups: expected at least two experts in each, and as many in all");
  }
  return {choice.k,
          scores_of(op, choice.scores),
          choice.renormalize,
          choice.descending,
          choice.scale,
          choice.precise,
          choice.eps,
          groups,
          kept,
          choice.dropped};
}

bool has_route_kernel(int experts, const Routing& routing, mx::Stream stream) {
  const bool is_plain = !routing.precise && routing.eps == least_sum() && routing.kept == routing.groups &&
                        routing.scores != cpu::Scores::sqrtsoftplus;
  return experts <= kMostExperts && routing.k <= kMostChosen && routing.groups <= kMostGroups &&
         (is_plain || has_all_routes(stream));
}

RouteParams route_params(const Routing& routing, int experts, bool has_bias) {
  return {static_cast<uint32_t>(experts),
          static_cast<uint32_t>(routing.k),
          static_cast<uint32_t>(routing.scores),
          routing.renormalize,
          routing.descending,
          has_bias,
          routing.scale,
          routing.precise,
          routing.eps,
          static_cast<uint32_t>(routing.groups),
          static_cast<uint32_t>(routing.kept),
          routing.dropped};
}

std::pair<mx::array, mx::array> chosen_experts(const mx::array& logits, const std::optional<mx::array>& bias,
                                               const Routing& routing, mx::Stream stream) {
  if (stream.device == mx::Device::gpu && !has_route_kernel(logits.shape(-1), routing, stream)) {
    const Arrays all = composition_of(logits, bias, routing, stream);
    return {all[0], all[1]};
  }
  Arrays inputs = {logits};
  if (bias) {
    inputs.push_back(*bias);
  }
  const auto [indices, weights] = RouteTopK::apply(std::move(inputs), routing, stream);
  return {indices, weights};
}

namespace {

struct Call {
  Arrays inputs;
  Routing routing;
};

Call checked(const mx::array& logits, const std::optional<mx::array>& bias, const RouteOptions& choice,
             mx::Stream stream) {
  if (logits.ndim() < 1) {
    checks::fail(op, "logits has no dimensions: expected at least one, the last of which is that of the experts");
  }
  const Routing routing = checked_routing(op, logits.shape(-1), "bias", bias, choice);
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"logits", logits}});
  Arrays inputs = {in_dtype(logits, dtype, stream)};
  if (bias) {
    checks::kernel_dtype(op, {{"bias", bias}});
    inputs.push_back(in_dtype(*bias, mx::float32, stream));
  }
  return {std::move(inputs), routing};
}

std::optional<Outputs> try_choice(const Call& call, mx::Stream stream) {
  const mx::array& logits = call.inputs[0];
  if (stream.device == mx::Device::gpu && !has_route_kernel(logits.shape(-1), call.routing, stream)) {
    return fallback(op, "more than " + std::to_string(kMostExperts) + " experts, more than " +
                            std::to_string(kMostChosen) + " chosen, more than " + std::to_string(kMostGroups) +
                            " groups, or on an NVIDIA GPU groups, scores in float32 or another eps");
  }
  const Problem problem{
      op,
      logits.dtype(),
      static_cast<uint32_t>(call.routing.scores),
      {problem_size(leading_size(logits, 1)), problem_size(logits.shape(-1)), problem_size(call.routing.k), 1}};
  if (prefer_mx(problem, nullptr, stream)) {
    return std::nullopt;
  }
  return RouteTopK::apply(call.inputs, call.routing, stream);
}

std::optional<Outputs> try_route_top_k(const mx::array& logits, int k, const std::optional<mx::array>& bias,
                                       const std::string& scores, bool renormalize, bool descending, float scale,
                                       bool precise, float eps, std::optional<std::pair<int, int>> groups,
                                       float dropped, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const RouteOptions choice{k, scores, renormalize, descending, scale, precise, eps, groups, dropped};
  return try_choice(checked(logits, bias, choice, stream), stream);
}

Outputs route_top_k(const mx::array& logits, int k, const std::optional<mx::array>& bias, const std::string& scores,
                    bool renormalize, bool descending, float scale, bool precise, float eps,
                    std::optional<std::pair<int, int>> groups, float dropped, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const RouteOptions choice{k, scores, renormalize, descending, scale, precise, eps, groups, dropped};
  const Call call = checked(logits, bias, choice, stream);
  if (auto outputs = try_choice(call, stream)) {
    return *std::move(outputs);
  }
  const Arrays all =
      composition_of(call.inputs[0], bias ? std::optional(call.inputs[1]) : std::nullopt, call.routing, stream);
  return {all[0], all[1]};
}

void bind(nb::module_& module) {
  define(module, op, &try_route_top_k, &route_top_k, "logits"_a, "k"_a, "bias"_a.none() = nb::none(),
         "scores"_a = "softmax", "renormalize"_a = false, "descending"_a = true, nb::kw_only(), "scale"_a = 1.0f,
         "precise"_a = false, "eps"_a = 1e-20, "groups"_a.none() = nb::none(), "dropped"_a = 0.0f,
         "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
