#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "mlx/ops.h"
#include "ops/matmul/activation.h"
#include "ops/matmul/affine.h"
#include "ops/matmul/normed_row.h"
#include "ops/moe/gather.h"
#include "ops/moe/route.h"
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
const Name normed_file = "moe/apple/normed_mixture.metal";

// w, scales and, in affine quantization, biases.
using Triple = Arrays;

// The triples of a call, each of three arrays: scales stand in for biases in modes without them. The shared expert's
// are last.
enum { kGate, kUp, kDown, kTriples, kSharedGate = kTriples, kSharedUp, kSharedDown, kAllTriples };
constexpr const char* triple_names[kAllTriples] = {"gate", "up", "down", "shared_gate", "shared_up", "shared_down"};

// The biases of an expert: of the outputs of gate, up and down.
enum { kBiases = 3 };

// Which inputs there are.
struct Parts {
  AffineFormat format;
  Activation activation;
  Routing routing;
  bool has_shared;
  bool has_bias;
  bool has_router_bias;
  std::optional<NormOfRow> row = {};  // x is a norm, whose squares are an input
  bool has_norm = false;  // the last inputs are a residual and the weight of a norm

  bool operator==(const Parts&) const = default;

  // Where they are: x, logits and triples are always there.
  static constexpr size_t logits = 1;
  static size_t triple(int i) {
    return 2 + 3 * static_cast<size_t>(i);
  }
  size_t shared_logits() const {
    return triple(kAllTriples);
  }
  size_t bias(int i) const {
    return triple(has_shared ? kAllTriples : kTriples) + (has_shared ? 1 : 0) + static_cast<size_t>(i);
  }
  size_t router_bias() const {
    return bias(has_bias ? kBiases : 0);
  }
  size_t squares() const {
    return router_bias() + (has_router_bias ? 1 : 0);
  }
  size_t residual() const {
    return squares() + (row ? 1 : 0);
  }
  mx::Dtype dtype(const Arrays& inputs) const {  // of the results
    return row ? row->dtype : inputs[0].dtype();
  }
  uint32_t places() const {  // of a token
    return static_cast<uint32_t>(routing.k) + (has_shared ? 1 : 0);
  }
};

// x [.., columns], logits [.., experts], the triples, of the shared expert with its logits [..], the biases and the
// router's -> y [.., outputs], and the arrays between the two launches: hidden [tokens, places, hidden], indices and
// weights [tokens, chosen]. With a norm y is the sum of a token and the residual; the first outputs are then as
// SummedProduct names them.
class Mixture : public KernelPrimitive, public SummedProduct, public HandsRowOn {
 public:
  Mixture(mx::Stream stream, const Parts& parts) : KernelPrimitive(stream), parts_(parts) {}

  const char* name() const override {
    return "MittensMixture";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return parts_ == static_cast<const Mixture&>(other).parts_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() = inputs[Parts::triple(kDown)].shape(-2);
    const int tokens = static_cast<int>(leading_size(inputs[0], 1));
    const mx::Shape chosen = {tokens, parts_.routing.k};
    std::vector<mx::Shape> shapes = {shape};
    if (parts_.has_norm) {
      shapes.insert(shapes.end(), {shape, {square_blocks(shape.back())}});
    }
    shapes.insert(
        shapes.end(),
        {{tokens, static_cast<int>(parts_.places()), inputs[Parts::triple(kGate)].shape(-2)}, chosen, chosen});
    return shapes;
  }

  std::optional<Arrays> with_sum(const Arrays& inputs, const mx::array& residual, const mx::array& weight) override {
    if (parts_.has_norm || leading_size(inputs[0], 1) != 1) {
      return std::nullopt;
    }
    Parts parts = parts_;
    parts.has_norm = true;
    Arrays all = inputs;
    all.insert(all.end(), {residual, weight});
    return outputs_of(std::make_shared<Mixture>(stream(), parts), std::move(all));
  }

  const mx::array* weight_of_row(const Arrays& inputs) const override {
    return parts_.has_norm ? &inputs[parts_.residual() + 1] : nullptr;
  }

  static Arrays outputs_of(const std::shared_ptr<Mixture>& primitive, Arrays inputs) {
    std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
    const std::vector<mx::Dtype> dtypes = primitive->output_dtypes(inputs);
    return mx::array::make_arrays(std::move(shapes), dtypes, primitive, std::move(inputs));
  }

  static mx::array result_of(const std::shared_ptr<Mixture>& primitive, Arrays inputs) {
    return outputs_of(primitive, std::move(inputs))[0];
  }

  // The parts one after another, by ops of their own where these have kernels.
  mx::array of_parts(const Arrays& inputs) {
    const mx::Stream s = stream();
    const AffineFormat& format = parts_.format;
    const mx::array x = parts_.row ? compose_row({inputs[0], inputs[parts_.squares()]}, *parts_.row, s) : inputs[0];
    const auto router_bias = parts_.has_router_bias ? std::optional(inputs[parts_.router_bias()]) : std::nullopt;
    const auto choice = chosen_experts(inputs[Parts::logits], router_bias, parts_.routing, s);
    const mx::array indices = mx::stop_gradient(choice.first, s);
    const auto triple = [&](int i) { return inputs.begin() + static_cast<ptrdiff_t>(Parts::triple(i)); };
    const auto bias = [&](int i) { return parts_.has_bias ? std::optional(inputs[parts_.bias(i)]) : std::nullopt; };
    const auto biases_of = [&](auto first) { return format.has_biases() ? std::optional(first[2]) : std::nullopt; };
    const auto chosen_product = [&](const mx::array& from, int i) {
      const auto first = triple(i);
      const mx::array y =
          mittens::gather_qmm(from, first[0], first[1], biases_of(first), std::nullopt, indices, true,
                              format.group_size, format.bits, mode_name(format), std::nullopt, false, s);
      return parts_.has_bias ? plus_bias_of_experts(y, *bias(i), indices, s) : y;
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
    const mx::array hidden = gated(chosen_product(rows, kGate), chosen_product(rows, kUp), parts_.activation, s);
    const auto down = triple(kDown);
    const mx::array y = gather_sum(without_rows(hidden), down[0], down[1], biases_of(down), indices, choice.second,
                                   bias(kDown), format.group_size, format.bits, mode_name(format), s);
    if (!parts_.has_shared) {
      return y;
    }
    // A stack of one matrix, which all tokens choose.
    const mx::array& shared_logits = inputs[parts_.shared_logits()];
    const mx::array none = mx::astype(mx::zeros_like(shared_logits, s), mx::uint32, s);
    const auto shared_product = [&](const mx::array& from, int i) {
      const auto first = triple(i);
      const auto stack = [&](const mx::array& a) { return mx::expand_dims(a, 0, s); };
      const auto biases = format.has_biases() ? std::optional(stack(first[2])) : std::nullopt;
      return mittens::gather_qmm(mx::expand_dims(from, -2, s), stack(first[0]), stack(first[1]), biases, std::nullopt,
                                 none, true, format.group_size, format.bits, mode_name(format), std::nullopt, false, s);
    };
    const mx::array shared = gated(shared_product(x, kSharedGate), shared_product(x, kSharedUp), parts_.activation, s);
    const mx::array of_shared = without_rows(shared_product(without_rows(shared), kSharedDown));
    const auto wide = [&](const mx::array& a) { return in_dtype(a, mx::float32, s); };
    const mx::array weight = mx::sigmoid(mx::expand_dims(wide(shared_logits), -1, s), s);
    return in_dtype(mx::add(wide(y), mx::multiply(weight, wide(of_shared), s), s), x.dtype(), s);
  }

 protected:
  bool sums_nothing(const Arrays& inputs) const override {
    return inputs[0].shape(-1) == 0 || inputs[Parts::triple(kGate)].shape(-2) == 0;
  }

  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    copies = inputs;
    for (size_t i : {size_t(0), Parts::logits}) {
      copies[i] = contiguous_rows(inputs[i], stream());
    }
    for (size_t i = Parts::triple(parts_.has_shared ? kAllTriples : kTriples); i < inputs.size(); ++i) {
      copies[i] = contiguous_rows(inputs[i], stream());
    }
    // The triples that a launch reads share their strides; a matrix's three arrays share the stride from row to row.
    using Triples = std::vector<int>;
    share_strides(copies, Triples{kGate, kUp}, parts_.has_shared ? Triples{kSharedGate, kSharedUp} : Triples{});
    share_strides(copies, Triples{kDown}, parts_.has_shared ? Triples{kSharedDown} : Triples{});
    return copies;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& x = inputs[0];
    const auto tokens = static_cast<uint32_t>(leading_size(x, 1));
    MixtureParams params = params_of(inputs, kGate, tokens * parts_.places());
    params.experts.weights.gate_alpha = parts_.activation.alpha;
    params.experts.weights.gate_beta = parts_.activation.beta;
    params.experts.limit = parts_.activation.limit;
    params.experts.offset = parts_.activation.offset;
    Launch first;
    first.file = parts_.row ? normed_file : file;
    const mx::Dtype dtype = parts_.dtype(inputs);
    first.kernel =
        kernel_name(dtype, parts_.row ? "mixture_normed_swiglu" : "mixture_swiglu", format_name(parts_.format));
    share_out_chosen(first, sizes_of(params.experts.weights), kRowOutputs / 2, stream());
    first.input(x);
    for (int triple : {kGate, kUp, kSharedGate, kSharedUp}) {
      add_triple(first, inputs, triple);
    }
    for (int i : {kGate, kUp}) {
      add_bias(first, inputs, i);
    }
    const bool has_router_bias = parts_.has_router_bias;
    first.input(inputs[Parts::logits]).input_if(has_router_bias, inputs[has_router_bias ? parts_.router_bias() : 0]);
    // Behind the outputs of a sum: hidden, indices and weights.
    const auto between = outputs.end() - 3;
    first.output(between[0]).output(between[1]).output(between[2]).params(params);
    if (parts_.row) {
      const mx::array& squares = inputs[parts_.squares()];
      first.input(squares).params(norm_params(*parts_.row, squares));
    }

    const MixtureParams sum_params = params_of(inputs, kDown, tokens);
    Launch second;
    second.file = file;
    second.kernel =
        kernel_name(dtype, parts_.has_norm ? "mixture_normed_sum" : "mixture_sum", format_name(parts_.format));
    share_out_sums(second, sizes_of(sum_params.experts.weights), kRowOutputs, parts_.places(), stream());
    second.input(between[0]);
    for (int triple : {kDown, kSharedDown}) {
      add_triple(second, inputs, triple);
    }
    add_bias(second, inputs, kDown);
    second.input(between[1]).input(between[2]);
    second.input_if(parts_.has_shared, inputs[parts_.has_shared ? parts_.shared_logits() : 0]);
    if (parts_.has_norm) {
      second.input(inputs[parts_.residual()]).input(inputs[parts_.residual() + 1]);
      second.output(outputs[0]).output(outputs[1]).output(outputs[2]).params(sum_params);
    } else {
      second.output(outputs[0]).params(sum_params);
    }
    return in_order(std::move(first), std::move(second));
  }

  Arrays composed(const Arrays& inputs) override {
    const std::vector<mx::Shape> shapes = output_shapes(inputs);
    const std::vector<mx::Dtype> dtypes = output_dtypes(inputs);
    Arrays all = {of_parts(inputs)};
    if (parts_.has_norm) {
      all = compose_sum(all[0], inputs[parts_.residual()], inputs[parts_.residual() + 1], stream());
    }
    for (size_t i = all.size(); i < shapes.size(); ++i) {
      all.push_back(mx::zeros(shapes[i], dtypes[i], stream()));
    }
    return all;
  }

 private:
  std::vector<mx::Dtype> output_dtypes(const Arrays& inputs) const {
    const mx::Dtype dtype = parts_.dtype(inputs);
    if (parts_.has_norm) {
      return {dtype, mx::float32, mx::float32, dtype, mx::uint32, dtype};
    }
    return {dtype, dtype, mx::uint32, dtype};
  }

  // The experts' triple stands in for an absent shared expert's.
  void add_triple(Launch& launch, const Arrays& inputs, int triple) const {
    const bool is_there = triple < kTriples || parts_.has_shared;
    for (size_t i = 0; i < 3; ++i) {
      if (is_there) {
        add_view(launch, inputs[Parts::triple(triple) + i]);
      } else {
        launch.stand_in(inputs[Parts::triple(triple - kSharedGate) + i]);
      }
    }
  }

  void add_bias(Launch& launch, const Arrays& inputs, int i) const {
    launch.input_if(parts_.has_bias, inputs[parts_.has_bias ? parts_.bias(i) : 0]);
  }

  // Of a launch with `places` places along the third axis of its grid.
  MixtureParams params_of(const Arrays& inputs, int triple, uint32_t places) const {
    const size_t first = Parts::triple(triple);
    MixtureParams params{};
    QuantizedParams& weights = params.experts.weights;
    weights = affine_params(inputs[first], inputs[first + 1], inputs[first + 2], parts_.format);
    weights.matrices = places;
    weights.rows = 1;
    weights.columns =
        static_cast<uint32_t>(triple == kDown ? inputs[Parts::triple(kGate)].shape(-2) : inputs[0].shape(-1));
    weights.outputs = static_cast<uint32_t>(inputs[first].shape(-2));
    weights.has_bias = parts_.has_bias;
    params.experts.pairs_per_sum = parts_.places();
    params.route = route_params(parts_.routing, inputs[Parts::logits].shape(-1), parts_.has_router_bias);
    return params;
  }

  void share_strides(Arrays& arrays, const std::vector<int>& stacks, const std::vector<int>& alone) {
    const size_t model = Parts::triple(stacks.front());
    bool are_alike = true;
    for (size_t i = 0; i < 3; ++i) {
      const mx::array& of_model = arrays[model + i];
      for (int triple : stacks) {
        are_alike = are_alike && arrays[Parts::triple(triple) + i].strides() == of_model.strides();
      }
      for (int triple : alone) {
        are_alike = are_alike && arrays[Parts::triple(triple) + i].strides(0) == of_model.strides(1);
      }
    }
    for (const auto& triples : {stacks, alone}) {
      for (int triple : triples) {
        const size_t first = Parts::triple(triple);
        if (are_alike && is_prepared_affine(arrays[first], arrays[first + 1], arrays[first + 2])) {
          continue;
        }
        for (size_t i = 0; i < 3; ++i) {
          arrays[first + i] = contiguous_rows(arrays[first + i], stream());
        }
      }
    }
  }

  Parts parts_;
};

struct Call {
  Arrays inputs;
  Parts parts;
};

using MaybeTriple = std::optional<Triple>;
using MaybeArray = std::optional<mx::array>;

// The weights of a call.
struct Weights {
  const Triple& gate;
  const Triple& up;
  const Triple& down;
  const MaybeTriple& shared_gate;
  const MaybeTriple& shared_up;
  const MaybeTriple& shared_down;
  const MaybeArray& shared_logits;
  const MaybeArray& router_bias;
  const std::optional<std::vector<mx::array>>& bias;
};

// The router's choice as the caller has it.
struct Choice {
  int k;
  const std::string& scores;
  bool renormalize;
  bool descending;
  float scale;
};

void check_shapes(const Arrays& arrays, bool has_shared) {
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
  if (has_shared) {
    check(kSharedGate, of_one(kGate));
    check(kSharedUp, of_one(kGate));
    check(kSharedDown, of_one(kDown));
  }
  if (w(kDown).shape(0) != w(kGate).shape(0)) {
    checks::fail(op, "down has ", w(kDown).shape(0), " experts, gate has ", w(kGate).shape(0),
                 ": expected the same number");
  }
}

Call checked(const mx::array& x, const mx::array& logits, const Choice& choice, const Weights& given,
             std::optional<int> group_size, std::optional<int> bits, const std::string& mode,
             const std::string& activation, mx::Stream stream) {
  const AffineFormat format = affine_format(op, group_size, bits, true, mode);
  const Activation& known = activation_of(op, activation, true);
  if (x.ndim() < 1) {
    checks::fail(op, "x has no dimensions: expected at least one");
  }
  const mx::Shape tokens(x.shape().begin(), x.shape().end() - 1);
  if (logits.ndim() != x.ndim() || !std::equal(tokens.begin(), tokens.end(), logits.shape().begin())) {
    checks::fail(op, "logits has shape ", logits.shape(), ", x has shape ", x.shape(),
                 ": expected those of each token of x");
  }
  const bool has_shared = given.shared_gate.has_value();
  if (given.shared_up.has_value() != has_shared || given.shared_down.has_value() != has_shared ||
      given.shared_logits.has_value() != has_shared) {
    checks::fail(op, "shared_gate, shared_up, shared_down and shared_logits are not all there: expected all or none");
  }
  std::vector<const Triple*> triples = {&given.gate, &given.up, &given.down};
  if (has_shared) {
    triples.insert(triples.end(), {&*given.shared_gate, &*given.shared_up, &*given.shared_down});
    mx::Shape one = tokens;
    one.push_back(1);
    const mx::Shape& shape = given.shared_logits->shape();
    if (shape != tokens && shape != one) {
      checks::fail(op, "shared_logits has shape ", shape, ": expected ", tokens, " or ", one);
    }
    checks::floating(op, {{"shared_logits", *given.shared_logits}});
  }
  const bool affine = format.has_biases();
  Arrays arrays;
  for (size_t i = 0; i < triples.size(); ++i) {
    const Triple& triple = *triples[i];
    check_triple_size(op, triple_names[i], triple, format);
    arrays.insert(arrays.end(), {triple[0], triple[1], triple[affine ? 2 : 1]});
  }
  check_shapes(arrays, has_shared);
  for (size_t i = 0; i < triples.size(); ++i) {
    const bool is_down = i == kDown || i == kSharedDown;
    check_affine(op, is_down ? arrays[0].shape(1) : x.shape(-1), arrays[3 * i], arrays[3 * i + 1],
                 affine ? std::optional(arrays[3 * i + 2]) : std::nullopt, format);
  }
  const int experts = arrays[0].shape(0);
  if (logits.shape(-1) != experts) {
    checks::fail(op, "logits has ", logits.shape(-1), " columns, gate has ", experts,
                 " experts: expected a logit for each");
  }
  const Routing routing = checked_routing(op, experts, choice.k, "router_bias", given.router_bias, choice.scores,
                                          choice.renormalize, choice.descending, choice.scale);
  if (given.bias && given.bias->size() != kBiases) {
    checks::fail(op, "bias has ", given.bias->size(), " arrays: expected those of gate, up and down");
  }
  checks::floating(op, {{"logits", logits}});
  mx::Dtype dtype =
      affine ? checks::kernel_dtype(op, {{"x", x}, {"scales", arrays[1]}}) : checks::kernel_dtype(op, {{"x", x}});
  for (size_t i = 0; given.bias && i < kBiases; ++i) {
    const mx::array& bias = (*given.bias)[i];
    check_bias_of_experts(op, (std::string(triple_names[i]) + "'s bias").c_str(), bias, arrays[3 * i]);
    dtype = mx::promote_types(dtype, checks::kernel_dtype(op, {{"x", x}, {"bias", bias}}));
  }
  const auto typed = [&](const mx::array& a) { return in_dtype(a, dtype, stream); };
  Arrays inputs = {typed(x), typed(logits)};
  for (size_t i = 0; i < arrays.size(); ++i) {
    inputs.push_back(affine && i % 3 != 0 ? typed(arrays[i]) : arrays[i]);
  }
  if (has_shared) {
    const mx::array& shared = *given.shared_logits;
    inputs.push_back(typed(shared.shape() == tokens ? shared : mx::squeeze(shared, -1, stream)));
  }
  for (size_t i = 0; given.bias && i < kBiases; ++i) {
    inputs.push_back(typed((*given.bias)[i]));
  }
  if (given.router_bias) {
    checks::kernel_dtype(op, {{"router_bias", *given.router_bias}});
    inputs.push_back(in_dtype(*given.router_bias, mx::float32, stream));
  }
  return {std::move(inputs),
          {format, known, routing, has_shared, given.bias.has_value(), given.router_bias.has_value()}};
}

// Formats and numbers of experts that have kernels, where mx is not known to be ahead.
bool goes_to_kernels(const Call& call, mx::Stream stream) {
  if (is_switched_off(op)) {
    return false;
  }
  const Parts& parts = call.parts;
  const mx::array& x = call.inputs[0];
  const mx::array& gate = call.inputs[Parts::triple(kGate)];
  const size_t tokens = leading_size(x, 1), pairs = tokens * static_cast<size_t>(parts.routing.k);
  const ExpertSizes sizes{pairs, leading_size(gate, 2), static_cast<size_t>(x.shape(-1)),
                          static_cast<size_t>(gate.shape(-2))};
  return runs_kernels(stream) && has_common_kernels(parts.format) && parts.places() <= kMostSummed &&
         has_route_kernel(gate.shape(0), parts.routing.k) && x.size() > 0 && gate.size() > 0 &&
         call.inputs[Parts::triple(kDown)].size() > 0 && !why_not_launched(tokens * parts.places(), 1, stream) &&
         !prefer_mx_experts(experts_problem(op, x.dtype(), affine_number(parts.format), false, sizes), 0, stream);
}

// The call on kernels. If x is a norm whose row another product has taken in, this does too.
mx::array launched(const Call& call, const mx::array& x, mx::Stream stream) {
  Parts parts = call.parts;
  Arrays inputs = call.inputs;
  const bool may_take = inputs[0].id() == x.id() && shares_norm(stream);
  if (const auto row = may_take ? handed_on_row(x, stream) : std::nullopt) {
    parts.row = row->norm;
    inputs[0] = row->scaled;
    inputs.push_back(row->squares);
  }
  return Mixture::result_of(std::make_shared<Mixture>(stream, parts), std::move(inputs));
}

mx::array mixture(const mx::array& x, const mx::array& logits, int k, const Triple& gate, const Triple& up,
                  const Triple& down, const MaybeTriple& shared_gate, const MaybeTriple& shared_up,
                  const MaybeTriple& shared_down, const MaybeArray& shared_logits, std::optional<int> group_size,
                  std::optional<int> bits, const std::string& mode, const MaybeArray& router_bias,
                  const std::string& scores, bool renormalize, bool descending, float scale,
                  const std::optional<std::vector<mx::array>>& bias, const std::string& activation,
                  mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const Call call = checked(x, logits, {k, scores, renormalize, descending, scale},
                            {gate, up, down, shared_gate, shared_up, shared_down, shared_logits, router_bias, bias},
                            group_size, bits, mode, activation, stream);
  check_base<Mixture>();
  if (goes_to_kernels(call, stream)) {
    return launched(call, x, stream);
  }
  return std::make_shared<Mixture>(stream, call.parts)->of_parts(call.inputs);
}

// For the patch, which has its own parts: nothing where they are as good.
std::optional<mx::array> try_mixture(const mx::array& x, const mx::array& logits, int k, const Triple& gate,
                                     const Triple& up, const Triple& down, const MaybeTriple& shared_gate,
                                     const MaybeTriple& shared_up, const MaybeTriple& shared_down,
                                     const MaybeArray& shared_logits, std::optional<int> group_size,
                                     std::optional<int> bits, const std::string& mode, const MaybeArray& router_bias,
                                     const std::string& scores, bool renormalize, bool descending, float scale,
                                     const std::optional<std::vector<mx::array>>& bias, const std::string& activation,
                                     mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const Call call = checked(x, logits, {k, scores, renormalize, descending, scale},
                            {gate, up, down, shared_gate, shared_up, shared_down, shared_logits, router_bias, bias},
                            group_size, bits, mode, activation, stream);
  const bool is_one = leading_size(call.inputs[0], 1) == 1 && chooses_in_experts(stream);
  if (!is_one || !goes_to_kernels(call, stream)) {
    return std::nullopt;
  }
  return launched(call, x, stream);
}

void bind(nb::module_& module) {
  define(module, op, &try_mixture, &mixture, "x"_a, "logits"_a, "k"_a, "gate"_a, "up"_a, "down"_a,
         "shared_gate"_a.none() = nb::none(), "shared_up"_a.none() = nb::none(), "shared_down"_a.none() = nb::none(),
         "shared_logits"_a.none() = nb::none(), "group_size"_a.none() = nb::none(), "bits"_a.none() = nb::none(),
         "mode"_a = "affine", nb::kw_only(), "router_bias"_a.none() = nb::none(), "scores"_a = "softmax",
         "renormalize"_a = false, "descending"_a = true, "scale"_a = 1.0f, "bias"_a.none() = nb::none(),
         "activation"_a = "swiglu", "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
