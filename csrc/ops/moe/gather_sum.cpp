#include <functional>
#include <optional>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "cpu/parallel.h"
#include "cpu/moe/weighted_sum.h"
#include "mlx/ops.h"
#include "ops/matmul/quantized_weights.h"
#include "ops/moe/gather.h"
#include "ops/moe/plan.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/numerics.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "gather_sum";
const Name file = "moe/gather_qmm.metal";
const Name sums_file = "moe/apple/row_sums.metal";

// x: [.., chosen, columns].
ExpertSizes sizes_of_sums(const mx::array& x, const mx::array& w) {
  return {leading_size(x, 1), leading_size(w, 2), static_cast<size_t>(x.shape(-1)), static_cast<size_t>(w.shape(-2))};
}

// Of mx operations, the products ours where they are covered; the sum is in float32.
mx::array of_products(const mx::array& x, const Arrays& stack, const mx::array& indices, const mx::array& weights,
                      const std::optional<mx::array>& bias, const QuantizedFormat& format, mx::Dtype dtype,
                      mx::Stream stream) {
  const auto biases = format.has_biases() ? std::optional(stack[2]) : std::nullopt;
  mx::array y =
      mittens::gather_qmm(mx::expand_dims(x, -2, stream), stack[0], stack[1], biases, std::nullopt, indices, true,
                          format.group_size, format.bits, mode_name(format), std::nullopt, false, stream);
  y = mx::astype(y, mx::float32, stream);
  if (bias) {
    y = plus_bias_of_experts(y, *bias, indices, stream);
  }
  const mx::array wide = mx::expand_dims(mx::astype(weights, mx::float32, stream), -1, stream);
  return mx::astype(mx::sum(mx::multiply(mx::squeeze(y, -2, stream), wide, stream), -2, false, stream), dtype, stream);
}

// x [.., chosen, columns], the triple, the biases of outputs if there are any, indices and weights [.., chosen] in
// uint32, and in float32 or x's dtype -> y [.., outputs].
class GatherSum : public KernelPrimitive {
 public:
  GatherSum(mx::Stream stream, QuantizedFormat format) : KernelPrimitive(stream), format_(format) {}

  const char* name() const override {
    return "MittensGatherSum";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& sum = static_cast<const GatherSum&>(other);
    return format_ == sum.format_ && numerics_ == sum.numerics_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape(inputs[0].shape().begin(), inputs[0].shape().end() - 2);
    shape.push_back(inputs[1].shape(-2));
    return {shape};
  }

 protected:
  bool sums_nothing(const Arrays& inputs) const override {
    return inputs[0].shape(-2) == 0 || inputs[0].shape(-1) == 0;
  }

  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    copies = {contiguous_rows(inputs[0], stream())};
    Arrays triple(inputs.begin() + 1, inputs.begin() + 4);
    if (!is_prepared_triple(triple[0], triple[1], triple[2])) {
      triple = prepared_triple(triple[0], triple[1], triple[2], stream());
    }
    copies.insert(copies.end(), triple.begin(), triple.end());
    for (size_t i = 4; i < inputs.size(); ++i) {
      copies.push_back(contiguous_rows(inputs[i], stream()));
    }
    return copies;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const WithNumerics with(numerics_);
    const mx::array& x = inputs[0];
    const bool has_bias = inputs.size() > 6;
    const mx::array& indices = inputs[inputs.size() - 2];
    const uint32_t chosen = x.shape(-2);
    const auto sums = static_cast<uint32_t>(indices.size() / chosen);
    const ExpertSizes sizes = sizes_of_sums(x, inputs[1]);
    GatherQmmParams params = gather_params({inputs[1], inputs[2], inputs[3]}, format_, x, inputs[1].shape(-2));
    params.weights.matrices = sums;
    params.weights.rows = 1;
    params.weights.has_bias = has_bias;
    params.pairs = {static_cast<uint32_t>(leading_size(inputs[1], 2)), sums * chosen, 1, 0};
    params.pairs_per_sum = chosen;
    params.weights_of_sum = inputs.back().dtype() == mx::float32 ? kWideWeights : kWeightsOfX;
    if (takes_expert_tiles(sizes, 1, stream())) {
      return tiled(inputs, outputs[0], sizes, params);
    }
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(x.dtype(), "gather_qmm", format_name(format_));
    share_out_sums(launch, sizes_of(params.weights), kRowOutputs, chosen, stream());
    launch.input(x);
    for (int i = 1; i < 4; ++i) {
      add_view(launch, inputs[i]);
    }
    launch.input_if(has_bias, inputs[has_bias ? 4 : 0]);
    launch.input(inputs.back());
    launch.input(indices);
    launch.stand_in(indices);
    return in_order(launch.output(outputs[0]).params(params));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const bool has_bias = inputs.size() > 6;
    const mx::array& indices = inputs[inputs.size() - 2];
    const cpu::Gather gather{
        .matrices = indices.data<uint32_t>(),
        .inputs = nullptr,
        .pairs_per_input = 1,
        .pairs = indices.size(),
        .stack = leading_size(inputs[1], 2),
        .input_count = indices.size(),
        .rows = 1,
        .columns = static_cast<size_t>(inputs[0].shape(-1)),
        .outputs = static_cast<size_t>(inputs[1].shape(-2)),
    };
    return [type = native_type(inputs[0].dtype()), stack = native_quantized(inputs[1], inputs[2], inputs[3], format_),
            gather, x = data_of(inputs[0]), bias = has_bias ? data_of(inputs[4]) : nullptr,
            weights = data_of(inputs.back()), weights_type = native_type(inputs.back().dtype()),
            chosen = static_cast<size_t>(inputs[0].shape(-2)), y = data_of(outputs[0]),
            mode = native_mode(numerics_, gather.pairs)] {
      const cpu::Scratch products(gather.pairs * gather.outputs);
      cpu::gather_quantized(type, stack.data(), gather, x, products.data(), mode);
      cpu::weighted_sum(type, products.data(), bias, gather.matrices, gather.stack, weights, weights_type, y,
                        gather.pairs / chosen, chosen, gather.outputs);
    };
  }

  Arrays composed(const Arrays& inputs) override {
    const auto bias = inputs.size() > 6 ? std::optional(inputs[4]) : std::nullopt;
    return {of_products(inputs[0], {inputs[1], inputs[2], inputs[3]}, inputs[inputs.size() - 2], inputs.back(), bias,
                        format_, inputs[0].dtype(), stream())};
  }

 private:
  // Products by tiles of the rows that have the same expert, and the sums of these.
  std::vector<Launch> tiled(const Arrays& inputs, mx::array& y, const ExpertSizes& sizes,
                            const GatherQmmParams& params) {
    constexpr uint32_t threads = 256;
    const mx::array& x = inputs[0];
    const bool has_bias = inputs.size() > 6;
    auto tiles = expert_tiles(params.pairs, inputs[inputs.size() - 2], nullptr, 1,
                              plan_expert_tiles(expert_tile_rows(format_), sizes), stream());
    const uint32_t chosen = x.shape(-2), outputs = y.shape(-1);
    const auto products = std::make_shared<const mx::array>(
        temporary({static_cast<int>(sizes.rows), static_cast<int>(outputs)}, x.dtype(), stream()));
    Launch product = tiled_product(tiles, inputs, has_bias ? &inputs[4] : nullptr, *products, format_, params);
    const auto pack = static_cast<uint32_t>(16 / x.itemsize());
    const RowSumsParams sums{chosen, outputs, outputs % pack == 0, params.weights_of_sum};
    Launch sum;
    sum.file = sums_file;
    sum.kernel = kernel_name(x.dtype(), "row_sums");
    const uint32_t columns = sums.packs ? outputs / pack : outputs;
    sum.threads = {std::min(columns, threads), 1, 1};
    sum.threadgroups = {ceil_divide(columns, sum.threads.x), params.weights.matrices, 1};
    sum.owner = products;
    sum.input(*products).input(inputs.back()).output(y).params(sums);
    return in_order(std::move(tiles.launch), std::move(product), std::move(sum));
  }

  QuantizedFormat format_;
  Numerics numerics_ = numerics();  // at the time of the call
};

}  // namespace

mx::array gather_sum(const mx::array& x, const mx::array& w, const mx::array& scales,
                     const std::optional<mx::array>& biases, const mx::array& indices, const mx::array& weights,
                     const std::optional<mx::array>& bias, std::optional<int> group_size, std::optional<int> bits,
                     const std::string& mode, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const QuantizedFormat format = quantized_format(op, group_size, bits, true, mode);
  if (x.ndim() < 2) {
    checks::fail(op, "x has shape ", x.shape(), ": expected at least two dimensions");
  }
  if (!mx::issubdtype(indices.dtype(), mx::integer)) {
    checks::fail<DtypeError>(op, "indices has dtype ", indices.dtype(), ": expected integers");
  }
  check_quantized(op, x, w, scales, biases, format);
  const mx::Shape pairs(x.shape().begin(), x.shape().end() - 1);
  for (const auto& [name, array] : {std::pair("indices", &indices), std::pair("weights", &weights)}) {
    if (array->shape() != pairs) {
      checks::fail(op, name, " has shape ", array->shape(), ", x has shape ", x.shape(), ": expected shape ", pairs);
    }
  }
  checks::floating(op, {{"weights", weights}});
  if (bias) {
    check_bias_of_experts(op, "bias", *bias, w);
  }
  const bool affine = format.has_biases();
  const auto optional = [&](const mx::array& array) { return affine ? std::optional(array) : std::nullopt; };
  const mx::Dtype dtype =
      checks::kernel_dtype(op, {{"x", x}, {"scales", optional(scales)}, {"biases", biases}, {"bias", bias}});
  const size_t chosen = pairs.back(), sums = leading_size(x, 2);
  const ExpertSizes sizes = sizes_of_sums(x, w);
  const bool by_tiles = takes_expert_tiles(sizes, 1, stream);
  std::string reason;
  if (const char* why = why_not_covered(format)) {
    reason = why;
  } else if (!by_tiles && chosen > kMostSummed) {
    reason = "sums of more than " + std::to_string(kMostSummed) + " experts";
  } else if (const char* why = by_tiles ? nullptr : why_not_launched(sums, 1, stream)) {
    reason = why;
  }
  const bool is_bias = bias && x.shape(-1) == 0;  // nothing is multiplied
  if (!reason.empty() && !is_bias) {
    fallback(op, reason);
  }
  if (!reason.empty() || is_bias ||
      prefer_mx_experts(experts_problem(op, dtype, format_number(format), false, sizes), 1, stream)) {
    return of_products(x, {w, scales, biases.value_or(scales)}, indices, weights, bias, format, dtype, stream);
  }
  auto typed = [&](const mx::array& array) { return in_dtype(array, dtype, stream); };
  Arrays inputs = {typed(x), w, affine ? typed(scales) : scales, affine ? typed(*biases) : scales};
  if (bias) {
    inputs.push_back(typed(*bias));
  }
  inputs.push_back(as_indices(indices, stream));
  inputs.push_back(weights.dtype() == dtype ? weights : in_dtype(weights, mx::float32, stream));
  return first_output(std::make_shared<GatherSum>(stream, format), std::move(inputs));
}

namespace {

void bind(nb::module_& module) {
  bind_function(module, op, &gather_sum, "x"_a, "w"_a, "scales"_a, "biases"_a.none(), "indices"_a, "weights"_a,
                nb::kw_only(), "bias"_a.none() = nb::none(), "group_size"_a.none() = nb::none(),
                "bits"_a.none() = nb::none(), "mode"_a = "affine", "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
