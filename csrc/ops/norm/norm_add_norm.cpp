#include <optional>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include "cpu/norm/clipped_sum.h"
#include "cpu/norm/norm_add_norm.h"
#include "cpu/norm/rms_norm.h"
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "ops/norm/norm_vjp.h"
#include "ops/norm/norms.h"
#include "ops/norm/row_primitive.h"
#include "ops/norm/weight_offset.h"
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

constexpr const char* op = "norm_add_norm";
const Name file = "norm/norm_add_norm.metal";
const Name clipped_file = "norm/clipped_norm_add_norm.metal";
constexpr float largest_half = 65504;

mx::array compose_sum_of_norm(const mx::array& residual, const mx::array& normed, bool clips, mx::Stream stream) {
  if (!clips) {
    return mx::add(residual, normed, stream);
  }
  const auto wide = [&](const mx::array& a) { return mx::astype(a, mx::float32, stream); };
  const mx::array sum = mx::add(wide(residual), wide(normed), stream);
  return mx::astype(mx::clip(sum, mx::array(-largest_half), mx::array(largest_half), stream), mx::float16, stream);
}

struct NormAddNormOptions {
  float eps;
  bool has_weight;
  bool has_next_weight;
  float weight_offset;
  float next_weight_offset;
  bool clips;

  bool operator==(const NormAddNormOptions&) const = default;
};

// x and residual [.., columns], weight and next weight [columns], if there are any -> y and the sum.
class NormAddNorm : public RowPrimitive {
 public:
  NormAddNorm(mx::Stream stream, const mx::array& x, const NormAddNormOptions& options)
      : RowPrimitive(stream, op, {2, 2, 0}, x), options_(options) {}

  const NormAddNormOptions& options() const {
    return options_;
  }

  const char* name() const override {
    return "MittensNormAddNorm";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const NormAddNorm&>(other).options_;
  }

  // The sum's gradient is the residual's and, through the first norm, gives x's; a clipped sum has none.
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override {
    const auto is_wanted = [&](int argument) { return contains(argnums, argument); };
    const int next = 2 + options_.has_weight;
    const bool wants_weight = options_.has_weight && is_wanted(2);
    NormGradients of_sum = norm_gradients(outputs[1], next_weight(primals), cotangents[0], cotangents[1],
                                          {.eps = options_.eps,
                                           .weight_gradient = options_.has_next_weight && is_wanted(next),
                                           .weight_offset = options_.next_weight_offset},
                                          stream());
    if (options_.clips) {
      const mx::array is_inside = mx::less(mx::abs(outputs[1], stream()), mx::array(largest_half), stream());
      of_sum.x = mx::where(is_inside, of_sum.x, mx::zeros_like(of_sum.x, stream()), stream());
    }
    std::optional<NormGradients> of_x;
    if (is_wanted(0) || wants_weight) {
      of_x = norm_gradients(
          primals[0], weight(primals), of_sum.x, std::nullopt,
          {.eps = options_.eps, .weight_gradient = wants_weight, .weight_offset = options_.weight_offset}, stream());
    }
    Arrays selected;
    for (int argument : argnums) {
      selected.push_back(argument == 0                          ? of_x->x
                         : argument == 1                        ? of_sum.x
                         : argument == 2 && options_.has_weight ? *of_x->weight
                                                                : *of_sum.weight);
    }
    return selected;
  }

 protected:
  std::shared_ptr<RowPrimitive> like(const mx::array& x) override {
    return std::make_shared<NormAddNorm>(stream(), x, options_);
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const int weight = options_.has_weight ? 2 : -1;
    const int next = options_.has_next_weight ? 2 + options_.has_weight : -1;
    return row_launches(options_.clips ? clipped_file : file, inputs,
                        {{weight, options_.weight_offset}, {next, options_.next_weight_offset}}, outputs, options_.eps,
                        options_.clips ? "clipped_" : "");
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const size_t columns = inputs[0].shape(-1);
    const cpu::NormScale scale{options_.has_weight ? data_of(inputs[2]) : nullptr, options_.weight_offset};
    const cpu::NormScale next{options_.has_next_weight ? data_of(inputs.back()) : nullptr, options_.next_weight_offset};
    return [type = native_type(inputs[0].dtype()), x = data_of(inputs[0]), residual = data_of(inputs[1]), scale, next,
            y = data_of(outputs[0]), sum = data_of(outputs[1]), rows = inputs[0].size() / columns, columns,
            eps = options_.eps, clips = options_.clips] {
      if (clips) {
        cpu::clipped_sum(x, residual, scale, sum, rows, columns, eps);
        cpu::rms_norm(type, sum, next.values, y, rows, columns, eps, next.offset);
      } else {
        cpu::norm_add_norm(type, x, residual, scale, next, y, sum, rows, columns, eps);
      }
    };
  }

  Arrays composed(const Arrays& inputs) override {
    const mx::array normed =
        compose_rms_norm(inputs[0], weight(inputs), options_.eps, options_.weight_offset, stream());
    const mx::array sum = compose_sum_of_norm(inputs[1], normed, options_.clips, stream());
    return {compose_rms_norm(sum, next_weight(inputs), options_.eps, options_.next_weight_offset, stream()), sum};
  }

 private:
  std::optional<mx::array> weight(const Arrays& inputs) const {
    return options_.has_weight ? std::optional(inputs[2]) : std::nullopt;
  }
  std::optional<mx::array> next_weight(const Arrays& inputs) const {
    return options_.has_next_weight ? std::optional(inputs.back()) : std::nullopt;
  }

  NormAddNormOptions options_;
};

}  // namespace

std::pair<mx::array, mx::array> norm_add_norm(const mx::array& x, const mx::array& residual,
                                              const std::optional<mx::array>& weight,
                                              const std::optional<mx::array>& next_weight, float eps,
                                              float weight_offset, float next_weight_offset, bool clip_sum,
                                              mx::StreamOrDevice where) {
  checks::has_axis(op, "x", x);
  checks::same_shape(op, "residual", residual, x);
  if (weight) {
    checks::per_column(op, "weight", *weight, x);
  }
  if (next_weight) {
    checks::per_column(op, "next_weight", *next_weight, x);
  }
  checks::epsilon(op, eps);
  const float offset = checked_offset(op, "weight_offset", weight_offset, "weight", weight);
  const float next_offset = checked_offset(op, "next_weight_offset", next_weight_offset, "next_weight", next_weight);
  const mx::Dtype dtype =
      checks::floating(op, {{"x", x}, {"residual", residual}, {"weight", weight}, {"next_weight", next_weight}});
  const mx::Stream stream = checks::checked_stream(op, where);
  // A weight of a wider type than x widens only the results after it: outputs of two types.
  const mx::Dtype normed_dtype = checks::floating(op, {{"x", x}, {"weight", weight}});
  const bool is_one_type = normed_dtype == dtype && checks::promoted({{"residual", residual}, {"x", x}}) == dtype;
  if (!is_one_type || !has_kernels(dtype) || prefer_mx(row_problem(op, x, dtype), nullptr, stream)) {
    const mx::array normed = rms_norm(x, weight, eps, offset, stream);
    if (clip_sum && checks::promoted({{"residual", residual}, {"the norm", normed}}) == mx::float16) {
      const mx::array sum = compose_sum_of_norm(residual, normed, true, stream);
      return {rms_norm(sum, next_weight, eps, next_offset, stream), sum};
    }
    return add_rms_norm(normed, residual, next_weight, eps, next_offset, stream);
  }

  Arrays inputs;
  inputs.reserve(4);
  inputs.push_back(in_dtype(x, dtype, stream));
  inputs.push_back(in_dtype(residual, dtype, stream));
  for (const auto* scale : {&weight, &next_weight}) {
    if (*scale) {
      inputs.push_back(in_dtype(**scale, dtype, stream));
    }
  }
  const bool clips = clip_sum && dtype == mx::float16;
  const NormAddNormOptions options{eps, weight.has_value(), next_weight.has_value(), offset, next_offset, clips};
  Arrays outputs = RowPrimitive::outputs_of(std::make_shared<NormAddNorm>(stream, inputs[0], options), inputs);
  return {std::move(outputs[0]), std::move(outputs[1])};
}

std::optional<PendingNormAdd> pending_norm_add(const mx::array& sum) {
  const auto* primitive = is_pending(sum) ? dynamic_cast<const NormAddNorm*>(&sum.primitive()) : nullptr;
  const bool is_sum = primitive && !primitive->options().has_next_weight && sum.outputs()[1].id() == sum.id();
  if (!is_sum) {
    return std::nullopt;
  }
  const NormAddNormOptions& options = primitive->options();
  const auto weight = options.has_weight ? std::optional(sum.inputs()[2]) : std::nullopt;
  return PendingNormAdd{{sum.inputs()[0], weight, options.eps, options.weight_offset}, sum.inputs()[1], options.clips};
}

namespace {

void bind(nb::module_& module) {
  bind_function(module, op, &norm_add_norm, "x"_a, "residual"_a, "weight"_a.none(), "next_weight"_a.none(), "eps"_a,
                nb::kw_only(), "weight_offset"_a = 0.0f, "next_weight_offset"_a = 0.0f, "clip_sum"_a = false,
                "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
