#include <optional>

#include <nanobind/nanobind.h>

#include "cpu/norm/layer_norm.h"
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "ops/norm/norm_vjp.h"
#include "ops/norm/norms.h"
#include "ops/norm/row_primitive.h"
#include "params/norm.h"
#include "python/registry.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "layer_norm";
const Name file = "norm/layer_norm.metal";

// x [.., columns], then weight and bias [columns], as far as there are any -> y.
class LayerNorm : public RowPrimitive {
 public:
  LayerNorm(mx::Stream stream, const mx::array& x, bool has_weight, bool has_bias, float eps)
      : RowPrimitive(stream, op, {1, 1, 3, 8}, x), has_weight_(has_weight), has_bias_(has_bias), eps_(eps) {}

  const char* name() const override {
    return "MittensLayerNorm";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& norm = static_cast<const LayerNorm&>(other);
    return has_weight_ == norm.has_weight_ && has_bias_ == norm.has_bias_ && eps_ == norm.eps_ &&
           has_workspace() == norm.has_workspace();
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays&) override {
    auto asked = [&](int argument) { return argument > 0 && contains(argnums, argument); };
    const NormGradients gradients = norm_gradients(
        primals[0], weight(primals), cotangents[0], std::nullopt,
        {.centred = true, .eps = eps_, .weight_gradient = asked(weight_index()), .bias_gradient = asked(bias_index())},
        stream());
    Arrays selected;
    for (int argument : argnums) {
      selected.push_back(argument == 0 ? gradients.x : argument == bias_index() ? *gradients.bias : *gradients.weight);
    }
    return selected;
  }

 protected:
  std::shared_ptr<RowPrimitive> like(const mx::array& x) override {
    return std::make_shared<LayerNorm>(stream(), x, has_weight_, has_bias_, eps_);
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    return row_launches(file, inputs, {weight_index(), bias_index()}, outputs, eps_);
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const size_t columns = inputs[0].shape(-1);
    return [type = native_type(inputs[0].dtype()), x = data_of(inputs[0]),
            weight = has_weight_ ? data_of(inputs[weight_index()]) : nullptr,
            bias = has_bias_ ? data_of(inputs[bias_index()]) : nullptr, y = data_of(outputs[0]),
            rows = inputs[0].size() / columns, columns,
            eps = eps_] { cpu::layer_norm(type, x, weight, bias, y, rows, columns, eps); };
  }

  Arrays composed(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const mx::array x = mx::astype(inputs[0], mx::float32, s);
    const mx::array centred = compose_centred(x, s);
    const mx::array variance = compose_row_mean(mx::square(centred, s), s);
    const mx::array n = mx::rsqrt(mx::add(variance, mx::array(eps_), s), s);
    mx::array y = mx::astype(mx::multiply(centred, n, s), inputs[0].dtype(), s);
    if (has_weight_) {
      y = mx::multiply(y, inputs[weight_index()], s);
    }
    if (has_bias_) {
      y = mx::add(y, inputs[bias_index()], s);
    }
    return with_workspace({y});
  }

 private:
  int weight_index() const {
    return has_weight_ ? 1 : -1;
  }
  int bias_index() const {
    return has_bias_ ? 1 + has_weight_ : -1;
  }
  std::optional<mx::array> weight(const Arrays& inputs) const {
    return has_weight_ ? std::optional(inputs[weight_index()]) : std::nullopt;
  }

  bool has_weight_;
  bool has_bias_;
  float eps_;
};

std::optional<mx::array> try_layer_norm(const mx::array& x, const std::optional<mx::array>& weight,
                                        const std::optional<mx::array>& bias, float eps, mx::StreamOrDevice where) {
  checks::has_axis(op, "x", x);
  if (weight) {
    checks::per_column(op, "weight", *weight, x);
  }
  if (bias) {
    checks::per_column(op, "bias", *bias, x);
  }
  checks::epsilon(op, eps);
  // As in mx, a bias widens the result only beside a weight.
  const mx::Dtype dtype =
      weight ? checks::floating(op, {{"x", x}, {"weight", weight}, {"bias", bias}}) : checks::floating(op, {{"x", x}});
  const mx::Stream stream = checks::checked_stream(op, where);
  if (!has_kernels(dtype)) {
    return x.size() == 0 ? std::optional(mx::zeros(x.shape(), dtype, stream)) : fallback(op, "float64");
  }
  if (prefer_mx(row_problem(op, x, dtype), nullptr, stream)) {
    return std::nullopt;
  }

  Arrays inputs;
  inputs.reserve(3);
  inputs.push_back(in_dtype(x, dtype, stream));
  for (const auto* parameter : {&weight, &bias}) {
    if (*parameter) {
      inputs.push_back(in_dtype(**parameter, dtype, stream));
    }
  }
  auto primitive = std::make_shared<LayerNorm>(stream, inputs[0], weight.has_value(), bias.has_value(), eps);
  return RowPrimitive::result_of(std::move(primitive), std::move(inputs));
}

mx::array layer_norm(const mx::array& x, const std::optional<mx::array>& weight, const std::optional<mx::array>& bias,
                     float eps, mx::StreamOrDevice where) {
  auto y = try_layer_norm(x, weight, bias, eps, where);
  return y ? *std::move(y) : mx::fast::layer_norm(x, weight, bias, eps, where);
}

void bind(nb::module_& module) {
  define(module, op, &try_layer_norm, &layer_norm, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a, nb::kw_only(),
         "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
