#include <optional>

#include <nanobind/nanobind.h>

#include "cpu/rms_norm.h"
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

constexpr const char* op = "rms_norm";
const Name file = "norm/rms_norm.metal";

// x [.., columns] and weight [columns], if there is one -> y.
class RmsNorm : public RowPrimitive {
 public:
  RmsNorm(mx::Stream stream, const mx::array& x, float eps) : RowPrimitive(stream, op, {1, 1, 1}, x), eps_(eps) {}

  const char* name() const override {
    return "MittensRmsNorm";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& norm = static_cast<const RmsNorm&>(other);
    return eps_ == norm.eps_ && has_workspace() == norm.has_workspace();
  }

  float eps() const {
    return eps_;
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays&) override {
    const auto weight = optional_input(primals, 1);
    const NormGradients gradients = norm_gradients(
        primals[0], weight, cotangents[0], std::nullopt,
        {.centred = false, .eps = eps_, .weight_gradient = argnums.back() == 1, .bias_gradient = false}, stream());
    Arrays selected;
    for (int argument : argnums) {
      selected.push_back(argument == 0 ? gradients.x : *gradients.weight);
    }
    return selected;
  }

 protected:
  std::shared_ptr<RowPrimitive> like(const mx::array& x) override {
    return std::make_shared<RmsNorm>(stream(), x, eps_);
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    return row_launches(file, inputs, {inputs.size() > 1 ? 1 : -1}, outputs, eps_);
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const size_t columns = inputs[0].shape(-1);
    return [type = native_type(inputs[0].dtype()), x = data_of(inputs[0]),
            weight = inputs.size() > 1 ? data_of(inputs[1]) : nullptr, y = data_of(outputs[0]),
            rows = inputs[0].size() / columns, columns,
            eps = eps_] { cpu::rms_norm(type, x, weight, y, rows, columns, eps); };
  }

  Arrays composed(const Arrays& inputs) override {
    return with_workspace({compose_rms_norm(inputs[0], optional_input(inputs, 1), eps_, stream())});
  }

 private:
  float eps_;
};

}  // namespace

std::optional<mx::array> try_rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps,
                                      mx::StreamOrDevice where) {
  checks::has_axis(op, "x", x);
  if (weight) {
    checks::per_column(op, "weight", *weight, x);
  }
  checks::epsilon(op, eps);
  const mx::Dtype dtype = checks::floating(op, {{"x", x}, {"weight", weight}});
  const mx::Stream stream = checks::checked_stream(op, where);
  if (!has_kernels(dtype)) {
    return x.size() == 0 ? std::optional(mx::zeros(x.shape(), dtype, stream)) : fallback(op, "float64");
  }
  if (prefer_mx(row_problem(op, x, dtype), nullptr, stream)) {
    return std::nullopt;
  }

  Arrays inputs;
  inputs.reserve(2);
  inputs.push_back(copyable(in_dtype(x, dtype, stream), stream));
  if (weight) {
    inputs.push_back(copyable(in_dtype(*weight, dtype, stream), stream));
  }
  auto primitive = std::make_shared<RmsNorm>(stream, inputs[0], eps);
  return RowPrimitive::result_of(std::move(primitive), std::move(inputs));
}

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::StreamOrDevice where) {
  auto y = try_rms_norm(x, weight, eps, where);
  return y ? *std::move(y) : mx::fast::rms_norm(x, weight, eps, where);
}

std::optional<PendingRmsNorm> pending_rms_norm(const mx::array& y) {
  if (!is_pending(y) || y.inputs().size() != 2) {
    return std::nullopt;
  }
  const auto* norm = dynamic_cast<const RmsNorm*>(&y.primitive());
  return norm ? std::optional<PendingRmsNorm>({y.inputs()[0], y.inputs()[1], norm->eps()}) : std::nullopt;
}

mx::array compose_rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::Stream s) {
  const mx::array wide = mx::astype(x, mx::float32, s);
  const mx::array square = mx::mean(mx::square(wide, s), -1, true, s);
  const mx::array n = mx::rsqrt(mx::add(square, mx::array(eps), s), s);
  const mx::array y = mx::astype(mx::multiply(wide, n, s), x.dtype(), s);
  return weight ? mx::multiply(y, *weight, s) : y;
}

namespace {

void bind(nb::module_& module) {
  define(module, op, &try_rms_norm, &rms_norm, "x"_a, "weight"_a.none(), "eps"_a, nb::kw_only(),
         "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
