#include <optional>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include "cpu/norm/rms_norm.h"
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

constexpr const char* op = "add_rms_norm";
const Name file = "norm/add_rms_norm.metal";

// x and residual [.., columns] and weight [columns], if there is one -> y and the sum.
class AddRmsNorm : public RowPrimitive {
 public:
  AddRmsNorm(mx::Stream stream, const mx::array& x, float eps, float weight_offset)
      : RowPrimitive(stream, op, {2, 2, 1}, x), eps_(eps), weight_offset_(weight_offset) {}

  const char* name() const override {
    return "MittensAddRmsNorm";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& norm = static_cast<const AddRmsNorm&>(other);
    return eps_ == norm.eps_ && weight_offset_ == norm.weight_offset_ && has_workspace() == norm.has_workspace();
  }

  float eps() const {
    return eps_;
  }

  float weight_offset() const {
    return weight_offset_;
  }

  // The gradients with respect to x and to the residual are both the sum's.
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override {
    const auto weight = optional_input(primals, 2);
    const NormGradients gradients = norm_gradients(
        outputs[1], weight, cotangents[0], cotangents[1],
        {.eps = eps_, .weight_gradient = argnums.back() == 2, .weight_offset = weight_offset_}, stream());
    Arrays selected;
    for (int argument : argnums) {
      selected.push_back(argument == 2 ? *gradients.weight : gradients.x);
    }
    return selected;
  }

 protected:
  std::shared_ptr<RowPrimitive> like(const mx::array& x) override {
    return std::make_shared<AddRmsNorm>(stream(), x, eps_, weight_offset_);
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    return row_launches(file, inputs, {{inputs.size() > 2 ? 2 : -1, weight_offset_}}, outputs, eps_);
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const size_t columns = inputs[0].shape(-1);
    return
        [type = native_type(inputs[0].dtype()), x = data_of(inputs[0]), residual = data_of(inputs[1]),
         weight = inputs.size() > 2 ? data_of(inputs[2]) : nullptr, y = data_of(outputs[0]), sum = data_of(outputs[1]),
         rows = inputs[0].size() / columns, columns, eps = eps_,
         offset = weight_offset_] { cpu::add_rms_norm(type, x, residual, weight, y, sum, rows, columns, eps, offset); };
  }

  Arrays composed(const Arrays& inputs) override {
    const mx::array sum = mx::add(inputs[0], inputs[1], stream());
    return with_workspace({compose_rms_norm(sum, optional_input(inputs, 2), eps_, weight_offset_, stream()), sum});
  }

 private:
  float eps_;
  float weight_offset_;
};

}  // namespace

std::pair<mx::array, mx::array> add_rms_norm(const mx::array& x, const mx::array& residual,
                                             const std::optional<mx::array>& weight, float eps, float weight_offset,
                                             mx::StreamOrDevice where) {
  checks::has_axis(op, "x", x);
  checks::same_shape(op, "residual", residual, x);
  if (weight) {
    checks::per_column(op, "weight", *weight, x);
  }
  checks::epsilon(op, eps);
  const float offset = checked_offset(op, "weight_offset", weight_offset, "weight", weight);
  const mx::Dtype sum_dtype = checks::floating(op, {{"x", x}, {"residual", residual}});
  const mx::Dtype dtype = checks::floating(op, {{"x", x}, {"residual", residual}, {"weight", weight}});
  const mx::Stream stream = checks::checked_stream(op, where);
  const bool is_covered = has_kernels(dtype);
  if (!is_covered) {
    fallback(op, "float64");
  }
  if (!is_covered || prefer_mx(row_problem(op, x, dtype), nullptr, stream)) {
    const mx::array sum = mx::add(x, residual, stream);
    const bool is_offset = weight && offset != 0;
    const auto scale = is_offset ? compose_scale(*weight, offset, stream) : weight;
    const mx::array y =
        sum.size() == 0 ? mx::zeros(sum.shape(), dtype, stream) : mx::fast::rms_norm(sum, scale, eps, stream);
    return {y, sum};
  }
  // A weight of a wider type widens the norm but not the sum: two outputs of two types.
  if (dtype != sum_dtype) {
    const mx::array sum = mx::add(x, residual, stream);
    return {rms_norm(sum, weight, eps, offset, stream), sum};
  }

  Arrays inputs;
  inputs.reserve(3);
  inputs.push_back(in_dtype(x, dtype, stream));
  inputs.push_back(in_dtype(residual, dtype, stream));
  if (weight) {
    inputs.push_back(in_dtype(*weight, dtype, stream));
  }
  Arrays outputs = RowPrimitive::outputs_of(std::make_shared<AddRmsNorm>(stream, inputs[0], eps, offset), inputs);
  return {std::move(outputs[0]), std::move(outputs[1])};
}

std::optional<PendingAddRmsNorm> pending_add_rms_norm(const mx::array& y) {
  const auto* norm = is_pending(y) ? dynamic_cast<const AddRmsNorm*>(&y.primitive()) : nullptr;
  if (!norm || y.siblings().empty()) {
    return std::nullopt;
  }
  const Arrays outputs = y.outputs();
  if (outputs[0].id() != y.id()) {
    return std::nullopt;
  }
  const Arrays& inputs = y.inputs();
  return PendingAddRmsNorm{
      {inputs[0], optional_input(inputs, 2), norm->eps(), norm->weight_offset()}, inputs[1], outputs[1]};
}

namespace {

void bind(nb::module_& module) {
  bind_function(module, op, &add_rms_norm, "x"_a, "residual"_a, "weight"_a.none(), "eps"_a, nb::kw_only(),
                "weight_offset"_a = 0.0f, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
