#include <functional>
#include <optional>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "mlx/ops.h"
#include "ops/matmul/quantized_weights.h"
#include "ops/moe/gather.h"
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

constexpr const char* op = "gather_qmm";
const Name file = "moe/gather_qmm.metal";
const Name tiles_file = "moe/apple/gather_qmm_tiles.metal";

Problem problem_of(const mx::array& x, const mx::array& w, const Pairs& pairs, int outputs,
                   const QuantizedFormat& format, bool sorted, mx::Dtype dtype) {
  return experts_problem(op, dtype, format_number(format), sorted, expert_sizes(x, pairs, w, outputs));
}

int outputs_of_stack(const mx::array& w, const QuantizedFormat& format) {
  return format.transpose ? w.shape(-2) : static_cast<int>(int64_t(w.shape(-1)) * 32 / format.bits);
}

mx::array product_of_mx(const mx::array& x, const mx::array& w, const mx::array& scales,
                        const std::optional<mx::array>& biases, const std::optional<mx::array>& lhs,
                        const std::optional<mx::array>& rhs, bool transpose, std::optional<int> group_size,
                        std::optional<int> bits, const std::string& mode, const std::optional<mx::array>& global_scale,
                        bool sorted, mx::Stream stream) {
#if MLX_VERSION_NUMERIC >= 32003
  return mx::gather_qmm(x, w, scales, biases, lhs, rhs, transpose, group_size, bits, mode, global_scale, sorted,
                        stream);
#else
  if (global_scale) {
    checks::fail(op, "global_scale is an array: expected None, since the mx of mlx ", MITTENS_MLX_VERSION,
                 " takes none (mlx 0.32.3 is the first that does)");
  }
  return mx::gather_qmm(x, w, scales, biases, lhs, rhs, transpose, group_size, bits, mode, sorted, stream);
#endif
}

class GatherQmm final : public GatherPrimitive {
 public:
  GatherQmm(mx::Stream stream, QuantizedFormat format, bool sorted = false)
      : GatherPrimitive(stream, 3), format_(format), sorted_(sorted) {}

  const char* name() const override {
    return "MittensGatherQmm";
  }

  PendingGather pending() const {
    return {format_, sorted_};
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& product = static_cast<const GatherQmm&>(other);
    return format_ == product.format_ && numerics_ == product.numerics_;
  }

  // y is linear in x, and in scales and biases together.
  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override {
    std::vector<std::optional<mx::array>> tangent(primals.size());
    for (size_t i = 0; i < argnums.size(); ++i) {
      tangent[argnums[i]] = tangents[i];
    }
    const Pairs pairs = pairs_of(primals);
    mx::array sum = tangent[0] ? apply(*tangent[0], stacks_of(primals), pairs)
                               : mx::zeros(output_shapes(primals)[0], primals[0].dtype(), stream());
    if (tangent[2] || tangent[3]) {
      const mx::array none = mx::zeros_like(primals[2], stream());
      const mx::array by_groups =
          apply(primals[0], {primals[1], tangent[2].value_or(none), tangent[3].value_or(none)}, pairs);
      sum = mx::add(sum, by_groups, stream());
    }
    return {sum};
  }

 protected:
  int outputs_of(const Arrays& inputs) const override {
    return outputs_of_stack(inputs[1], format_);
  }

  Problem problem(const mx::array& x, const Arrays& stacks, const Pairs& pairs) const override {
    return problem_of(x, stacks[0], pairs, outputs_of_stack(stacks[0], format_), format_, false, x.dtype());
  }

  mx::array apply(const mx::array& x, const Arrays& stacks, const Pairs& pairs) override {
    return first_output(std::make_shared<GatherQmm>(stream(), format_), gather_inputs(x, stacks, pairs));
  }

  std::optional<mx::array> transposed(const mx::array& dy, const Arrays& stacks, const mx::array& experts) override {
    QuantizedFormat format = format_;
    format.transpose = !format.transpose;
    const Pairs pairs{experts, std::nullopt};
    auto primitive = std::make_shared<GatherQmm>(stream(), format);
    const Problem problem = primitive->problem(dy, stacks, pairs);
    const uint32_t matrices = primitive->tiled_matrices(stacks[0]);
    const bool by_tiles = takes_expert_tiles(sizes_of(problem), matrices, stream());
    const bool is_covered = !why_not_gathered(dy, pairs, format.transpose, stream(), by_tiles);
    if (!is_covered || prefer_mx_experts(problem, matrices, stream())) {
      return primitive->composed(gather_inputs(dy, stacks, pairs))[0];
    }
    return first_output(std::move(primitive), gather_inputs(dy, stacks, pairs));
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const WithNumerics with(numerics_);
    if (!format_.transpose) {
      return native_alone(inputs, outputs);
    }
    if (auto tiles = tiles_of(inputs, expert_tile_rows(format_))) {
      return in_order(std::move(tiles->launch),
                      tiled_product(*tiles, inputs, nullptr, outputs[0], format_, tiled_params(inputs, format_)));
    }
    Launch launch;
    launch.file = file;
    const bool shares = shares_pairs(inputs, format_, 1);
    launch.kernel = kernel_name(inputs[0].dtype(), shares ? "gather_qmm_shared" : op, format_name(format_));
    const GatherQmmParams params = share_out_pairs(launch, inputs, format_, kRowOutputs);
    launch.input(inputs[0]);
    for (int i = 1; i < 4; ++i) {
      add_view(launch, inputs[i]);
    }
    launch.stand_in(inputs[0]);  // there are no biases of outputs
    if (!shares) {
      launch.stand_in(inputs[0]);  // and no weights
    }
    add_pairs(launch, inputs);
    return in_order(launch.output(outputs[0]).params(params));
  }

  uint32_t tiled_matrices(const mx::array&) const override {
    return format_.transpose ? 1 : 0;
  }

  void prepare_stacks(Arrays& stacks) override {
    if (!is_prepared_triple(stacks[0], stacks[1], stacks[2])) {
      stacks = prepared_triple(stacks[0], stacks[1], stacks[2], stream());
    }
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const cpu::Gather gather = native_gather(inputs);
    return [type = native_type(inputs[0].dtype()), stack = native_quantized(inputs[1], inputs[2], inputs[3], format_),
            gather, x = data_of(inputs[0]), y = data_of(outputs[0]),
            mode = native_mode(numerics_, gather.pairs * gather.rows)] {
      cpu::gather_quantized(type, stack.data(), gather, x, y, mode);
    };
  }

  Arrays composed(const Arrays& inputs) override {
    auto wide = [&](size_t i) {
      return i == 0 || format_.has_biases() ? in_dtype(inputs[i], mx::float32, stream()) : inputs[i];
    };
    const auto biases = format_.has_biases() ? std::optional(wide(3)) : std::nullopt;
    return {guarded(
        pairs_of(inputs), inputs[0], inputs[1], output_shapes(inputs)[0], inputs[0].dtype(),
        [&](const std::optional<mx::array>& lhs, const mx::array& rhs) {
          return product_of_mx(wide(0), inputs[1], wide(2), biases, lhs, rhs, format_.transpose, format_.group_size,
                               format_.bits, mode_name(format_), std::nullopt, false, stream());
        },
        stream())};
  }

 private:
  QuantizedFormat format_;
  bool sorted_;  // tells no results apart
};

std::optional<mx::array> try_gather_qmm(const mx::array& x, const mx::array& w, const mx::array& scales,
                                        const std::optional<mx::array>& biases,
                                        const std::optional<mx::array>& lhs_indices,
                                        const std::optional<mx::array>& rhs_indices, bool transpose,
                                        std::optional<int> group_size, std::optional<int> bits, const std::string& mode,
                                        const std::optional<mx::array>& global_scale, bool sorted_indices,
                                        mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const QuantizedFormat format = quantized_format(op, group_size, bits, transpose, mode);
  if (x.ndim() < 2) {
    checks::fail(op, "x has shape ", x.shape(), ": expected at least two dimensions");
  }
  check_indices(op, lhs_indices, rhs_indices);
  check_quantized(op, x, w, scales, biases, format);
  const bool affine = format.has_biases();
  if (global_scale) {
    if (format.mode != cpu::QuantizedMode::nvfp4) {
      checks::fail(op, "global_scale is an array: expected None, as mode ", mode, " has no global scale");
    }
    return fallback(op, "a global scale");
  }
  const mx::Dtype dtype = affine ? checks::kernel_dtype(op, {{"x", x}, {"scales", scales}, {"biases", *biases}})
                                 : checks::kernel_dtype(op, {{"x", x}});
  if (const char* reason = why_not_covered(format)) {
    return fallback(op, reason);
  }
  const Pairs pairs = gather_pairs(op, x, w, lhs_indices, rhs_indices, stream);
  const Problem problem = problem_of(x, w, pairs, outputs_of_stack(w, format), format, sorted_indices, dtype);
  const uint32_t matrices = transpose ? 1 : 0;
  const bool by_tiles = takes_expert_tiles(sizes_of(problem), matrices, stream);
  if (const char* reason = why_not_gathered(x, pairs, transpose, stream, by_tiles)) {
    return fallback(op, reason);
  }
  if (prefer_mx_experts(problem, matrices, stream)) {
    return std::nullopt;
  }
  auto typed = [&](const mx::array& array) { return in_dtype(array, dtype, stream); };
  return first_output(
      std::make_shared<GatherQmm>(stream, format, sorted_indices),
      gather_inputs(typed(x), {w, affine ? typed(scales) : scales, affine ? typed(*biases) : scales}, pairs));
}

// mx's, with indices within the arrays.
mx::array gather_qmm_of_mx(const mx::array& x, const mx::array& w, const mx::array& scales,
                           const std::optional<mx::array>& biases, const std::optional<mx::array>& lhs_indices,
                           const std::optional<mx::array>& rhs_indices, bool transpose, std::optional<int> group_size,
                           std::optional<int> bits, const std::string& mode,
                           const std::optional<mx::array>& global_scale, bool sorted_indices, mx::Stream stream) {
  const Pairs pairs = gather_pairs(op, x, w, lhs_indices, rhs_indices, stream);
  auto product = [&](const std::optional<mx::array>& lhs, const mx::array& rhs) {
    return product_of_mx(x, w, scales, biases, lhs, rhs, transpose, group_size, bits, mode, global_scale,
                         sorted_indices, stream);
  };
  const mx::array shaped = product(pairs.inputs, pairs.experts);  // checks its arguments
  return guarded(pairs, x, w, shaped.shape(), shaped.dtype(), product, stream);
}

}  // namespace

Launch tiled_product(const ExpertTiles& tiles, const Arrays& inputs, const mx::array* bias, const mx::array& y,
                     const QuantizedFormat& format, const GatherQmmParams& params) {
  Launch launch;
  launch.file = tiles_file;
  launch.kernel = kernel_name(inputs[0].dtype(), op, "tiles_", format_name(format), "_", tiles.plan.tile_rows);
  share_out_tiles(launch, tiles.plan, params.weights.outputs, 1);
  launch.input(inputs[0]);
  for (int i = 1; i < 4; ++i) {
    add_view(launch, inputs[i]);
  }
  launch.input_if(bias, bias ? *bias : inputs[0]);
  tiles.add_to(launch);
  return launch.output(y).params(params);
}

std::optional<PendingGather> pending_gather(const mx::array& y) {
  if (!is_pending(y)) {
    return std::nullopt;
  }
  const auto* product = dynamic_cast<const GatherQmm*>(&y.primitive());
  return product && product->pending().format.transpose ? std::optional(product->pending()) : std::nullopt;
}

mx::array gather_qmm(const mx::array& x, const mx::array& w, const mx::array& scales,
                     const std::optional<mx::array>& biases, const std::optional<mx::array>& lhs_indices,
                     const std::optional<mx::array>& rhs_indices, bool transpose, std::optional<int> group_size,
                     std::optional<int> bits, const std::string& mode, const std::optional<mx::array>& global_scale,
                     bool sorted_indices, mx::StreamOrDevice where) {
  if (auto y = try_gather_qmm(x, w, scales, biases, lhs_indices, rhs_indices, transpose, group_size, bits, mode,
                              global_scale, sorted_indices, where)) {
    return *std::move(y);
  }
  return gather_qmm_of_mx(x, w, scales, biases, lhs_indices, rhs_indices, transpose, group_size, bits, mode,
                          global_scale, sorted_indices, checks::checked_stream(op, where));
}

namespace {

void bind(nb::module_& module) {
  define(module, op, &try_gather_qmm, &gather_qmm, nb::arg(), nb::arg(), "scales"_a, "biases"_a.none() = nb::none(),
         "lhs_indices"_a.none() = nb::none(), "rhs_indices"_a.none() = nb::none(), "transpose"_a = true,
         "group_size"_a.none() = nb::none(), "bits"_a.none() = nb::none(), "mode"_a = "affine",
         "global_scale"_a.none() = nb::none(), nb::kw_only(), "sorted_indices"_a = false, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
