#include <algorithm>
#include <array>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "mlx/ops.h"
#include "ops/matmul/activation.h"
#include "ops/matmul/affine.h"
#include "ops/moe/gather.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
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
const Name file = "moe/mixture.metal";

// w, scales and, in affine quantization, biases.
using Triple = Arrays;

// The triples of a call, each of three arrays: scales stand in for biases in modes without these.
enum { kGate, kUp, kDown, kSharedGate, kSharedUp, kSharedDown, kTriples };
constexpr const char* triple_names[kTriples] = {"gate", "up", "down", "shared_gate", "shared_up", "shared_down"};

// Where the inputs of the primitive are.
constexpr size_t first_triple = 1, indices_at = 1 + 3 * kTriples, weights_at = indices_at + 1;
constexpr size_t logits_at = weights_at + 1;

size_t at_triple(int triple) {
  return first_triple + 3 * static_cast<size_t>(triple);
}

// x [.., columns], the triples, indices and weights [.., chosen] and logits [..] -> y [.., outputs] and what lies
// between the two launches, [tokens, chosen + 1, hidden].
class Mixture : public KernelPrimitive {
 public:
  Mixture(mx::Stream stream, AffineFormat format, Activation activation)
      : KernelPrimitive(stream), format_(format), activation_(activation) {}

  const char* name() const override {
    return "MittensMixture";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& mixture = static_cast<const Mixture&>(other);
    return format_ == mixture.format_ && activation_ == mixture.activation_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[at_triple(kDown)].shape(-2);
    const mx::array& indices = inputs[indices_at];
    const int chosen = indices.shape(-1);
    const int tokens = static_cast<int>(leading_size(indices, 1));
    return {shape, {tokens, chosen + 1, inputs[at_triple(kGate)].shape(-2)}};
  }

  static mx::array result_of(std::shared_ptr<Mixture> primitive, Arrays inputs) {
    std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
    const mx::Dtype dtype = inputs[0].dtype();
    return mx::array::make_arrays(std::move(shapes), {dtype, dtype}, primitive, std::move(inputs))[0];
  }

  // The parts one after another, by ops of their own where these have kernels.
  mx::array of_parts(const Arrays& inputs) {
    const mx::Stream s = stream();
    const mx::array& x = inputs[0];
    const mx::array& indices = inputs[indices_at];
    const auto triple = [&](int i) { return inputs.begin() + static_cast<ptrdiff_t>(at_triple(i)); };
    const auto biases_of = [&](auto first) { return format_.has_biases() ? std::optional(first[2]) : std::nullopt; };
    const auto chosen_product = [&](const mx::array& from, int i) {
      const auto first = triple(i);
      return mittens::gather_qmm(from, first[0], first[1], biases_of(first), std::nullopt, indices, true,
                                 format_.group_size, format_.bits, mode_name(format_), std::nullopt, false, s);
    };
    // A stack of one matrix, which all tokens choose.
    const mx::array none = mx::zeros_like(inputs[logits_at], s);
    const auto shared_product = [&](const mx::array& from, int i) {
      const auto first = triple(i);
      const auto stack = [&](const mx::array& a) { return mx::expand_dims(a, 0, s); };
      const auto biases = format_.has_biases() ? std::optional(stack(first[2])) : std::nullopt;
      return mittens::gather_qmm(mx::expand_dims(from, -2, s), stack(first[0]), stack(first[1]), biases, std::nullopt,
                                 mx::astype(none, mx::uint32, s), true, format_.group_size, format_.bits,
                                 mode_name(format_), std::nullopt, false, s);
    };
    // Axes of one row come and go by shapes: vmap of mx's expand_dims may put two of them elsewhere.
    const auto without_rows = [&](const mx::array& a) {
      mx::Shape shape = a.shape();
      shape.erase(shape.end() - 2);
      return mx::reshape(a, std::move(shape), s);
    };
    mx::Shape shape = x.shape();
    shape.insert(shape.end() - 1, {1, 1});
    const mx::array rows = mx::reshape(x, std::move(shape), s);
    const mx::array hidden = gated(chosen_product(rows, kGate), chosen_product(rows, kUp), activation_, s);
    const auto down = triple(kDown);
    const mx::array y = gather_sum(without_rows(hidden), down[0], down[1], biases_of(down), indices, inputs[weights_at],
                                   std::nullopt, format_.group_size, format_.bits, mode_name(format_), s);
    const mx::array shared = gated(shared_product(x, kSharedGate), shared_product(x, kSharedUp), activation_, s);
    const mx::array of_shared = without_rows(shared_product(without_rows(shared), kSharedDown));
    const mx::array weight = mx::sigmoid(mx::expand_dims(in_dtype(inputs[logits_at], mx::float32, s), -1, s), s);
    const auto wide = [&](const mx::array& a) { return in_dtype(a, mx::float32, s); };
    return in_dtype(mx::add(wide(y), mx::multiply(weight, wide(of_shared), s), s), x.dtype(), s);
  }

 protected:
  bool sums_nothing(const Arrays& inputs) const override {
    return inputs[0].shape(-1) == 0 || inputs[at_triple(kGate)].shape(-2) == 0;
  }

  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    copies = inputs;
    for (size_t i : {size_t(0), indices_at, weights_at, logits_at}) {
      copies[i] = contiguous_rows(inputs[i], stream());
    }
    // One set of strides serves the triples that a launch reads, and one from row to row also those of one matrix.
    share_strides(copies, {kGate, kUp}, {kSharedGate, kSharedUp});
    share_strides(copies, {kDown}, {kSharedDown});
    return copies;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& indices = inputs[indices_at];
    const auto chosen = static_cast<uint32_t>(indices.shape(-1));
    const auto tokens = static_cast<uint32_t>(leading_size(indices, 1));
    GatherQmmParams params = params_of(inputs, kGate, tokens * (chosen + 1), chosen);
    params.weights.gate_alpha = activation_.alpha;
    params.weights.gate_beta = activation_.beta;
    params.limit = activation_.limit;
    params.offset = activation_.offset;
    Launch first;
    first.file = file;
    first.kernel = kernel_name(inputs[0].dtype(), "mixture_swiglu", format_name(format_));
    share_out_pairs(first, sizes_of(params.weights), kRowOutputs / 2, stream());
    first.input(inputs[0]);
    for (int triple : {kGate, kUp, kSharedGate, kSharedUp}) {
      add_triple(first, inputs, triple);
    }
    first.input(indices).output(outputs[1]).params(params);

    const GatherQmmParams sum_params = params_of(inputs, kDown, tokens, chosen);
    Launch second;
    second.file = file;
    second.kernel = kernel_name(inputs[0].dtype(), "mixture_sum", format_name(format_));
    share_out_sums(second, sizes_of(sum_params.weights), kRowOutputs, chosen + 1, stream());
    second.input(outputs[1]);
    for (int triple : {kDown, kSharedDown}) {
      add_triple(second, inputs, triple);
    }
    second.input(indices).input(inputs[weights_at]).input(inputs[logits_at]);
    second.output(outputs[0]).params(sum_params);
    return in_order(std::move(first), std::move(second));
  }

  Arrays composed(const Arrays& inputs) override {
    return {of_parts(inputs), mx::zeros(output_shapes(inputs)[1], inputs[0].dtype(), stream())};
  }

 private:
  static void add_triple(Launch& launch, const Arrays& inputs, int triple) {
    for (size_t i = 0; i < 3; ++i) {
      add_view(launch, inputs[at_triple(triple) + i]);
    }
  }

  // Of a launch with `places` places along the third axis of its grid.
  GatherQmmParams params_of(const Arrays& inputs, int triple, uint32_t places, uint32_t chosen) const {
    const size_t first = at_triple(triple);
    GatherQmmParams params{};
    params.weights = affine_params(inputs[first], inputs[first + 1], inputs[first + 2], format_);
    params.weights.matrices = places;
    params.weights.rows = 1;
    params.weights.columns =
        static_cast<uint32_t>(triple == kDown ? inputs[at_triple(kGate)].shape(-2) : inputs[0].shape(-1));
    params.weights.outputs = static_cast<uint32_t>(inputs[first].shape(-2));
    params.pairs.matrices = static_cast<uint32_t>(inputs[first].shape(0));
    params.pairs_per_sum = chosen + 1;
    return params;
  }

  void share_strides(Arrays& arrays, std::initializer_list<int> stacks, std::initializer_list<int> alone) {
    const size_t model = at_triple(*stacks.begin());
    bool are_alike = true;
    for (size_t i = 0; i < 3; ++i) {
      const mx::array& of_model = arrays[model + i];
      for (int triple : stacks) {
        are_alike = are_alike && arrays[at_triple(triple) + i].strides() == of_model.strides();
      }
      for (int triple : alone) {
        are_alike = are_alike && arrays[at_triple(triple) + i].strides(0) == of_model.strides(1);
      }
    }
    for (const auto& triples : {stacks, alone}) {
      for (int triple : triples) {
        const size_t first = at_triple(triple);
        if (are_alike && is_prepared_affine(arrays[first], arrays[first + 1], arrays[first + 2])) {
          continue;
        }
        for (size_t i = 0; i < 3; ++i) {
          arrays[first + i] = contiguous_rows(arrays[first + i], stream());
        }
      }
    }
  }

  AffineFormat format_;
  Activation activation_;
};

struct Call {
  Arrays inputs;
  AffineFormat format;
  Activation activation;
};

Call checked(const mx::array& x, const mx::array& indices, const mx::array& weights, const mx::array& shared_logits,
             const std::array<const Triple*, kTriples>& triples, std::optional<int> group_size, std::optional<int> bits,
             const std::string& mode, const std::string& activation, mx::Stream stream) {
  const AffineFormat format = affine_format(op, group_size, bits, true, mode);
  const Activation& known = activation_of(op, activation, true);
  if (x.ndim() < 1) {
    checks::fail(op, "x has no dimensions: expected at least one");
  }
  const mx::Shape tokens(x.shape().begin(), x.shape().end() - 1);
  if (indices.ndim() != x.ndim() || !std::equal(tokens.begin(), tokens.end(), indices.shape().begin())) {
    checks::fail(op, "indices has shape ", indices.shape(), ", x has shape ", x.shape(),
                 ": expected as many for each token of x");
  }
  if (!mx::issubdtype(indices.dtype(), mx::integer)) {
    checks::fail<DtypeError>(op, "indices has dtype ", indices.dtype(), ": expected integers");
  }
  if (weights.shape() != indices.shape()) {
    checks::fail(op, "weights has shape ", weights.shape(), ", indices has shape ", indices.shape(),
                 ": expected the same shape");
  }
  mx::Shape one = tokens;
  one.push_back(1);
  if (shared_logits.shape() != tokens && shared_logits.shape() != one) {
    checks::fail(op, "shared_logits has shape ", shared_logits.shape(), ": expected ", tokens, " or ", one);
  }
  const bool affine = format.has_biases();
  Arrays arrays;
  for (int i = 0; i < kTriples; ++i) {
    const Triple& triple = *triples[i];
    check_triple_size(op, triple_names[i], triple, format);
    arrays.insert(arrays.end(), {triple[0], triple[1], triple[affine ? 2 : 1]});
  }
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
  check(kSharedGate, of_one(kGate));
  check(kSharedUp, of_one(kGate));
  check(kSharedDown, of_one(kDown));
  if (w(kDown).shape(0) != w(kGate).shape(0)) {
    checks::fail(op, "down has ", w(kDown).shape(0), " experts, gate has ", w(kGate).shape(0),
                 ": expected the same number");
  }
  for (int i = 0; i < kTriples; ++i) {
    const size_t first = 3 * static_cast<size_t>(i);
    const bool is_down = i == kDown || i == kSharedDown;
    check_affine(op, is_down ? w(kGate).shape(1) : x.shape(-1), arrays[first], arrays[first + 1],
                 affine ? std::optional(arrays[first + 2]) : std::nullopt, format);
  }
  checks::floating(op, {{"weights", weights}});
  checks::floating(op, {{"shared_logits", shared_logits}});
  const mx::Dtype dtype =
      affine ? checks::kernel_dtype(op, {{"x", x}, {"scales", arrays[1]}}) : checks::kernel_dtype(op, {{"x", x}});
  const auto typed = [&](const mx::array& a) { return in_dtype(a, dtype, stream); };
  Arrays inputs = {typed(x)};
  for (size_t i = 0; i < arrays.size(); ++i) {
    inputs.push_back(affine && i % 3 != 0 ? typed(arrays[i]) : arrays[i]);
  }
  inputs.push_back(as_indices(indices, stream));
  inputs.push_back(typed(weights));
  inputs.push_back(typed(shared_logits.shape() == tokens ? shared_logits : mx::squeeze(shared_logits, -1, stream)));
  return {std::move(inputs), format, known};
}

// Formats and numbers of experts that have kernels, where mx is not known to be ahead.
bool goes_to_kernels(const Call& call, mx::Stream stream) {
  if (is_switched_off(op)) {
    return false;
  }
  const mx::array& x = call.inputs[0];
  const mx::array& indices = call.inputs[indices_at];
  const mx::array& gate = call.inputs[at_triple(kGate)];
  const ExpertSizes sizes{indices.size(), leading_size(gate, 2), static_cast<size_t>(x.shape(-1)),
                          static_cast<size_t>(gate.shape(-2))};
  return runs_kernels(stream) && has_common_kernels(call.format) && indices.shape(-1) < kMostSummed &&
         indices.size() > 0 && x.size() > 0 && gate.size() > 0 && call.inputs[at_triple(kDown)].size() > 0 &&
         !why_not_launched(indices.size() + leading_size(indices, 1), 1, stream) &&
         !prefer_mx_experts(experts_problem(op, x.dtype(), affine_number(call.format), false, sizes), 0, stream);
}

mx::array mixture(const mx::array& x, const mx::array& indices, const mx::array& weights, const Triple& gate,
                  const Triple& up, const Triple& down, const Triple& shared_gate, const Triple& shared_up,
                  const Triple& shared_down, const mx::array& shared_logits, std::optional<int> group_size,
                  std::optional<int> bits, const std::string& mode, const std::string& activation,
                  mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const Call call =
      checked(x, indices, weights, shared_logits, {&gate, &up, &down, &shared_gate, &shared_up, &shared_down},
              group_size, bits, mode, activation, stream);
  check_base<Mixture>();
  auto primitive = std::make_shared<Mixture>(stream, call.format, call.activation);
  return goes_to_kernels(call, stream) ? Mixture::result_of(std::move(primitive), call.inputs)
                                       : primitive->of_parts(call.inputs);
}

// For the patch, which has its own parts: nothing where they are as good.
std::optional<mx::array> try_mixture(const mx::array& x, const mx::array& indices, const mx::array& weights,
                                     const Triple& gate, const Triple& up, const Triple& down,
                                     const Triple& shared_gate, const Triple& shared_up, const Triple& shared_down,
                                     const mx::array& shared_logits, std::optional<int> group_size,
                                     std::optional<int> bits, const std::string& mode, const std::string& activation,
                                     mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const Call call =
      checked(x, indices, weights, shared_logits, {&gate, &up, &down, &shared_gate, &shared_up, &shared_down},
              group_size, bits, mode, activation, stream);
  const bool is_one = leading_size(call.inputs[indices_at], 1) == 1;
  if (!is_one || !goes_to_kernels(call, stream)) {
    return std::nullopt;
  }
  return Mixture::result_of(std::make_shared<Mixture>(stream, call.format, call.activation), call.inputs);
}

void bind(nb::module_& module) {
  define(module, op, &try_mixture, &mixture, "x"_a, "indices"_a, "weights"_a, "gate"_a, "up"_a, "down"_a,
         "shared_gate"_a, "shared_up"_a, "shared_down"_a, "shared_logits"_a, "group_size"_a.none() = nb::none(),
         "bits"_a.none() = nb::none(), "mode"_a = "affine", nb::kw_only(), "activation"_a = "swiglu",
         "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
