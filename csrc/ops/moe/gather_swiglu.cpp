#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "mlx/ops.h"
#include "ops/matmul/activation.h"
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

constexpr const char* op = "gather_swiglu";
const Name file = "moe/gather_swiglu.metal";
const Name tiles_file = "moe/apple/gather_swiglu_tiles.metal";

// w, scales and, in affine quantization, biases.
using Triple = Arrays;

// Two stacks of w, scales and biases, and biases of outputs if there are any.
struct Experts {
  Arrays stacks;
  QuantizedFormat format;
  Activation activation;
};

// Of mx operations, the products ours where they are covered.
mx::array of_products(const mx::array& x, const Experts& experts, const std::optional<mx::array>& lhs,
                      const std::optional<mx::array>& rhs, bool sorted, mx::Stream stream) {
  const auto& [stacks, format, activation] = experts;
  auto product = [&](size_t matrix) {
    const size_t first = 3 * matrix;
    const auto biases = format.has_biases() ? std::optional(stacks[first + 2]) : std::nullopt;
    const mx::array y =
        mittens::gather_qmm(x, stacks[first], stacks[first + 1], biases, lhs, rhs, true, format.group_size, format.bits,
                            mode_name(format), std::nullopt, sorted, stream);
    return stacks.size() == 6 ? y : plus_bias_of_experts(y, stacks[6 + matrix], rhs, stream);
  };
  return gated(product(0), product(1), activation, stream);
}

// w: of gate or of up.
Problem problem_of(const mx::array& x, const mx::array& w, const Pairs& pairs, const QuantizedFormat& format,
                   bool sorted, mx::Dtype dtype) {
  return experts_problem(op, dtype, format_number(format), sorted, expert_sizes(x, pairs, w, w.shape(-2)));
}

class GatherSwiglu : public GatherPrimitive {
 public:
  GatherSwiglu(mx::Stream stream, QuantizedFormat format, Activation activation, size_t stacks)
      : GatherPrimitive(stream, stacks), format_(format), activation_(activation) {}

  const char* name() const override {
    return "MittensGatherSwiglu";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& swiglu = static_cast<const GatherSwiglu&>(other);
    return format_ == swiglu.format_ && activation_ == swiglu.activation_ && stacks() == swiglu.stacks() &&
           numerics_ == swiglu.numerics_;
  }

 protected:
  int outputs_of(const Arrays& inputs) const override {
    return inputs[1].shape(-2);
  }

  Problem problem(const mx::array& x, const Arrays& stacks, const Pairs& pairs) const override {
    return problem_of(x, stacks[0], pairs, format_, false, x.dtype());
  }

  mx::array apply(const mx::array& x, const Arrays& stacks, const Pairs& pairs) override {
    return first_output(std::make_shared<GatherSwiglu>(stream(), format_, activation_, stacks.size()),
                        gather_inputs(x, stacks, pairs));
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const WithNumerics with(numerics_);
    Launch launch;
    std::optional<ExpertTiles> tiles = tiles_of(inputs, expert_tile_rows(format_));
    GatherQmmParams params;
    if (tiles) {
      launch.file = tiles_file;
      launch.kernel = kernel_name(inputs[0].dtype(), op, "tiles_", format_name(format_), "_", tiles->plan.tile_rows);
      params = tiled_params(inputs, format_);
      share_out_tiles(launch, tiles->plan, params.weights.outputs, 2);
    } else {
      launch.file = file;
      launch.kernel = kernel_name(inputs[0].dtype(), shares_pairs(inputs, format_, 2) ? "gather_swiglu_shared" : op,
                                  format_name(format_));
      params = share_out_pairs(launch, inputs, format_, kRowOutputs / 2);
    }
    params.weights.has_bias = has_bias();
    params.weights.gate_alpha = activation_.alpha;
    params.weights.gate_beta = activation_.beta;
    params.limit = activation_.limit;
    params.offset = activation_.offset;
    launch.input(inputs[0]);
    for (int i = 1; i < 7; ++i) {
      add_view(launch, inputs[i]);
    }
    for (int i : {7, 8}) {
      launch.input_if(has_bias(), inputs[has_bias() ? i : 0]);
    }
    if (tiles) {
      tiles->add_to(launch);
      return in_order(std::move(tiles->launch), launch.output(outputs[0]).params(params));
    }
    add_pairs(launch, inputs);
    return in_order(launch.output(outputs[0]).params(params));
  }

  uint32_t tiled_matrices(const mx::array&) const override {
    return 2;
  }

  void prepare_stacks(Arrays& stacks) override {
    for (size_t i = 6; i < stacks.size(); ++i) {
      stacks[i] = contiguous_rows(stacks[i], stream());
    }
    // One set of strides serves both triples.
    bool are_alike = true;
    for (size_t i = 0; i < 3; ++i) {
      are_alike = are_alike && stacks[i].strides() == stacks[i + 3].strides();
    }
    if (!are_alike) {
      for (mx::array& stack : stacks) {
        stack = contiguous_rows(stack, stream());
      }
      return;
    }
    for (size_t first : {0, 3}) {
      if (!is_prepared_triple(stacks[first], stacks[first + 1], stacks[first + 2])) {
        const Arrays ready = prepared_triple(stacks[first], stacks[first + 1], stacks[first + 2], stream());
        std::copy(ready.begin(), ready.end(), stacks.begin() + static_cast<ptrdiff_t>(first));
      }
    }
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    if (has_bias() || activation_.is_clipped()) {
      return nullptr;
    }
    const cpu::Gather gather = native_gather(inputs);
    return [type = native_type(inputs[0].dtype()), activation = cpu::Activation{activation_.alpha, activation_.beta},
            gate = native_quantized(inputs[1], inputs[2], inputs[3], format_),
            up = native_quantized(inputs[4], inputs[5], inputs[6], format_), gather, x = data_of(inputs[0]),
            y = data_of(outputs[0]), mode = native_mode(numerics_, gather.pairs * gather.rows)] {
      cpu::gather_swiglu(type, activation, gate.data(), up.data(), gather, x, y, mode);
    };
  }

  Arrays composed(const Arrays& inputs) override {
    const Pairs pairs = pairs_of(inputs);
    return {of_products(inputs[0], {stacks_of(inputs), format_, activation_}, input_indices(pairs, inputs[0], stream()),
                        pairs.experts, false, stream())};
  }

 private:
  bool has_bias() const {
    return stacks() > 6;
  }

  QuantizedFormat format_;
  Activation activation_;
};

mx::array gather_swiglu(const mx::array& x, const Triple& gate, const Triple& up,
                        const std::optional<mx::array>& lhs_indices, const std::optional<mx::array>& rhs_indices,
                        std::optional<int> group_size, std::optional<int> bits, const std::string& mode,
                        const std::optional<std::pair<mx::array, mx::array>>& bias, const std::string& activation,
                        bool sorted_indices, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const QuantizedFormat format = quantized_format(op, group_size, bits, true, mode);
  const Activation& known = activation_of(op, activation, true);
  if (x.ndim() < 2) {
    checks::fail(op, "x has shape ", x.shape(), ": expected at least two dimensions");
  }
  check_indices(op, lhs_indices, rhs_indices);
  const bool affine = format.has_biases();
  Experts experts{{}, format, known};
  Arrays& stacks = experts.stacks;
  for (const auto& [name, triple] : {std::pair("gate", &gate), std::pair("up", &up)}) {
    check_triple_size(op, name, *triple, format);
    const auto& arrays = *triple;
    check_quantized(op, x, arrays[0], arrays[1], affine ? std::optional(arrays[2]) : std::nullopt, format);
    stacks.insert(stacks.end(), {arrays[0], arrays[1], arrays[affine ? 2 : 1]});
  }
  if (stacks[3].shape() != stacks[0].shape()) {
    checks::fail(op, "up's w has shape ", stacks[3].shape(), ", gate's has shape ", stacks[0].shape(),
                 ": expected the same shape");
  }
  if (bias) {
    check_bias_of_experts(op, "gate's bias", bias->first, stacks[0]);
    check_bias_of_experts(op, "up's bias", bias->second, stacks[0]);
    stacks.insert(stacks.end(), {bias->first, bias->second});
  }
  const auto optional = [&](bool there, size_t i) { return there ? std::optional(stacks[i]) : std::nullopt; };
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"x", x},
                                                    {"gate's scales", optional(affine, 1)},
                                                    {"gate's biases", optional(affine, 2)},
                                                    {"up's scales", optional(affine, 4)},
                                                    {"up's biases", optional(affine, 5)},
                                                    {"gate's bias", optional(bias.has_value(), 6)},
                                                    {"up's bias", optional(bias.has_value(), 7)}});
  auto products = [&] { return of_products(x, experts, lhs_indices, rhs_indices, sorted_indices, stream); };
  auto by_mx = [&](const std::string& reason) {
    fallback(op, reason);
    return products();
  };
  if (bias && x.shape(-1) == 0) {  // nothing is multiplied
    return products();
  }
  if (const char* reason = why_not_covered(format)) {
    return by_mx(reason);
  }
  const Pairs pairs = gather_pairs(op, x, stacks[0], lhs_indices, rhs_indices, stream);
  const Problem problem = problem_of(x, stacks[0], pairs, format, sorted_indices, dtype);
  const bool by_tiles = takes_expert_tiles(sizes_of(problem), 2, stream);
  if (const char* reason = why_not_gathered(x, pairs, true, stream, by_tiles)) {
    return by_mx(reason);
  }
  if (prefer_mx_experts(problem, 2, stream)) {
    return products();
  }
  for (size_t i = 0; i < stacks.size(); ++i) {
    if (i > 5 || (affine && i % 3 != 0)) {
      stacks[i] = in_dtype(stacks[i], dtype, stream);
    }
  }
  return first_output(std::make_shared<GatherSwiglu>(stream, format, known, stacks.size()),
                      gather_inputs(in_dtype(x, dtype, stream), stacks, pairs));
}

}  // namespace

std::optional<mx::array> try_gather_swiglu(const mx::array& gate, const mx::array& up, const Activation& activation) {
  const auto pending = pending_gather(gate);
  if (!pending || pending_gather(up) != pending || gate.shape() != up.shape() || gate.is_tracer()) {
    return std::nullopt;
  }
  const mx::Stream stream = gate.primitive().stream();
  const Arrays& inputs = gate.inputs();
  const Arrays& others = up.inputs();
  bool are_alike = up.primitive().stream() == stream && others.size() == inputs.size() &&
                   others[0].id() == inputs[0].id() && others[1].shape() == inputs[1].shape();
  for (size_t i = 4; are_alike && i < inputs.size(); ++i) {  // the indices
    are_alike = others[i].id() == inputs[i].id();
  }
  if (!are_alike) {
    return std::nullopt;
  }
  const Pairs pairs{inputs[4], std::nullopt};
  if (prefer_mx_experts(problem_of(inputs[0], inputs[1], pairs, pending->format, pending->sorted, gate.dtype()), 2,
                        stream)) {
    return std::nullopt;
  }
  Arrays all(inputs.begin(), inputs.begin() + 4);
  all.insert(all.end(), others.begin() + 1, others.begin() + 4);
  all.insert(all.end(), inputs.begin() + 4, inputs.end());
  return first_output(std::make_shared<GatherSwiglu>(stream, pending->format, activation, 6), std::move(all));
}

namespace {

// Whether the experts w [.., outputs, words] of many tokens are multiplied as they come; else mx is faster, which wants
// them sorted.
bool takes_unsorted_experts(const mx::array& x, const mx::array& w, const mx::array& indices,
                            std::optional<int> group_size, std::optional<int> bits, const std::string& mode) {
  const Uncounted uncounted;
  const QuantizedFormat format = quantized_format(op, group_size, bits, true, mode);
  if (x.ndim() == 0 || w.ndim() < 2 || why_not_covered(format)) {
    return false;
  }
  const mx::Stream stream = mx::default_stream(mx::default_device());
  const Problem problem = problem_of(x, w, {indices, std::nullopt}, format, false, x.dtype());
  const ExpertSizes sizes = sizes_of(problem);
  return are_exact(sizes) || (takes_expert_tiles(sizes, 2, stream) && !prefer_mx_experts(problem, 2, stream));
}

void bind(nb::module_& module) {
  module.def("takes_unsorted_experts", &takes_unsorted_experts, "x"_a, "w"_a, "indices"_a,
             "group_size"_a.none() = nb::none(), "bits"_a.none() = nb::none(), "mode"_a = "affine");
  bind_function(module, op, &gather_swiglu, "x"_a, "gate"_a, "up"_a, "lhs_indices"_a.none() = nb::none(),
                "rhs_indices"_a.none() = nb::none(), "group_size"_a.none() = nb::none(), "bits"_a.none() = nb::none(),
                "mode"_a = "affine", nb::kw_only(), "bias"_a.none() = nb::none(), "activation"_a = "swiglu",
                "sorted_indices"_a = false, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
