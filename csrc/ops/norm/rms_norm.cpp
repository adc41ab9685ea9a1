#include <optional>

#include <nanobind/nanobind.h>

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

constexpr const char* op = "rms_norm";
const Name file = "norm/rms_norm.metal";

// x [.., columns] and weight [columns], if there is one -> y.
class RmsNorm : public RowPrimitive {
 public:
  RmsNorm(mx::Stream stream, const mx::array& x, float eps, float weight_offset)
      : RowPrimitive(stream, op, {1, 1, 1}, x), eps_(eps), weight_offset_(weight_offset) {}

  const char* name() const override {
    return "MittensRmsNorm";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& norm = static_cast<const RmsNorm&>(other);
    return eps_ == norm.eps_ && weight_offset_ == norm.weight_offset_ && has_workspace() == norm.has_workspace();
  }

  float eps() const {
    return eps_;
  }

  float weight_offset() const {
    return weight_offset_;
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays&) override {
    const auto weight = optional_input(primals, 1);
    const NormGradients gradients = norm_gradients(
        primals[0], weight, cotangents[0], std::nullopt,
        {.eps = eps_, .weight_gradient = argnums.back() == 1, .weight_offset = weight_offset_}, stream());
    Arrays selected;
    for (int argument : argnums) {
      selected.push_back(argument == 0 ? gradients.x : *gradients.weight);
    }
    return selected;
  }

 protected:
  std::shared_ptr<RowPrimitive> like(const mx::array& x) override {
    return std::make_shared<RmsNorm>(stream(), x, eps_, weight_offset_);
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    return row_launches(file, inputs, {{inputs.size() > 1 ? 1 : -1, weight_offset_}}, outputs, eps_);
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const size_t columns = inputs[0].shape(-1);
    return [type = native_type(inputs[0].dtype()), x = data_of(inputs[0]),
            weight = inputs.size() > 1 ? data_of(inputs[1]) : nullptr, y = data_of(outputs[0]),
            rows = inputs[0].size() / columns, columns, eps = eps_,
            offset = weight_offset_] { cpu::rms_norm(type, x, weight, y, rows, columns, eps, offset); };
  }

  Arrays composed(const Arrays& inputs) override {
    return with_workspace({compose_rms_norm(inputs[0], optional_input(inputs, 1), eps_, weight_offset_, stream())});
  }

 private:
  float eps_;
  float weight_offset_;
};

}  // namespace

std::optional<mx::array> try_rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps,
                                      float weight_offset, mx::StreamOrDevice where) {
  checks::has_axis(op, "x", x);
  if (weight) {
    checks::per_column(op, "weight", *weight, x);
  }
  checks::epsilon(op, eps);
  const float offset = checked_offset(op, "weight_offset", weight_offset, "weight", weight);
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
  inputs.push_back(in_dtype(x, dtype, stream));
  if (weight) {
    inputs.push_back(in_dtype(*weight, dtype, stream));
  }
  auto primitive = std::make_shared<RmsNorm>(stream, inputs[0], eps, offset);
  return RowPrimitive::result_of(std::move(primitive), std::move(inputs));
}

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, float weight_offset,
                   mx::StreamOrDevice where) {
  auto y = try_rms_norm(x, weight, eps, weight_offset, where);
  if (y) {
    return *std::move(y);
  }
  const bool is_offset = weight && weight_offset != 0;
  return mx::fast::rms_norm(x, is_offset ? compose_scale(*weight, weight_offset, mx::to_stream(where)) : weight, eps,
                            where);
}

std::optional<PendingRmsNorm> pending_rms_norm(const mx::array& y) {
  const auto* norm = is_pending(y) ? dynamic_cast<const RmsNorm*>(&y.primitive()) : nullptr;
  if (!norm) {
    return std::nullopt;
  }
  return PendingRmsNorm{y.inputs()[0], optional_input(y.inputs(), 1), norm->eps(), norm->weight_offset()};
}

namespace {

// A row's mean as mx computes it, and the row without it.
struct RowMean {
  mx::array mean;
  mx::array about;  // the mean as a constant: a constant taken off a row changes no derivative
  mx::array near;  // the row without it
  mx::array rest;  // the mean of near
  mx::array is_nearer;  // whether near has smaller numbers than the row, so that their sum rounds less
};

RowMean row_mean_of(const mx::array& a, mx::Stream s) {
  auto mean_of = [&](const mx::array& terms) { return mx::mean(terms, -1, true, s); };
  const mx::array mean = mean_of(a);
  const mx::array about = mx::stop_gradient(mean, s);
  const mx::array near = mx::subtract(a, about, s);
  return {mean, about, near, mean_of(near), mx::less(mean_of(mx::abs(near, s)), mx::abs(about, s), s)};
}

}  // namespace

mx::array compose_row_mean(const mx::array& a, mx::Stream s) {
  const RowMean of = row_mean_of(a, s);
  return mx::where(of.is_nearer, mx::add(of.about, of.rest, s), of.mean, s);
}

mx::array compose_centred(const mx::array& a, mx::Stream s) {
  const RowMean of = row_mean_of(a, s);
  return mx::where(of.is_nearer, mx::subtract(of.near, of.rest, s), mx::subtract(a, of.mean, s), s);
}

mx::array compose_scale(const mx::array& weight, float weight_offset, mx::Stream s) {
  const bool is_narrow = weight.dtype() == mx::float16 || weight.dtype() == mx::bfloat16;
  const mx::array wide = weight.dtype() == mx::float64 ? weight : in_dtype(weight, mx::float32, s);
  const mx::array scale = mx::add(wide, mx::array(weight_offset, wide.dtype()), s);
  return is_narrow ? mx::astype(scale, weight.dtype(), s) : scale;
}

mx::array compose_rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, float weight_offset,
                           mx::Stream s) {
  const mx::array wide = mx::astype(x, mx::float32, s);
  const mx::array square = compose_row_mean(mx::square(wide, s), s);
  const mx::array n = mx::rsqrt(mx::add(square, mx::array(eps), s), s);
  const mx::array y = mx::astype(mx::multiply(wide, n, s), x.dtype(), s);
  if (!weight) {
    return y;
  }
  if (weight_offset == 0) {
    return mx::multiply(y, *weight, s);
  }
  const mx::array scale = mx::add(mx::astype(*weight, mx::float32, s), mx::array(weight_offset), s);
  return mx::astype(mx::multiply(mx::astype(y, mx::float32, s), scale, s), x.dtype(), s);
}

namespace {

void bind(nb::module_& module) {
  define(module, op, &try_rms_norm, &rms_norm, "x"_a, "weight"_a.none(), "eps"_a, nb::kw_only(),
         "weight_offset"_a = 0.0f, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
