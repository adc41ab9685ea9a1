#include "ops/moe/mixture_primitive.h"

#include <memory>
#include <utility>
#include <vector>

#include "mlx/ops.h"
#include "ops/moe/gather.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/op_binding.h"

namespace mittens {

namespace {

const Name file = "moe/mixture.metal";
const Name normed_file = "moe/apple/normed_mixture.metal";

class Mixture : public KernelPrimitive, public SummedProduct, public HandsRowOn {
 public:
  Mixture(mx::Stream stream, const MixtureParts& parts) : KernelPrimitive(stream), parts_(parts) {}

  const char* name() const override {
    return "MittensMixture";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return parts_ == static_cast<const Mixture&>(other).parts_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::Shape shape = with_columns(inputs[0].shape(), inputs[MixtureParts::triple(kDown)].shape(-2));
    const int tokens = static_cast<int>(leading_size(inputs[0], 1));
    const mx::Shape chosen = {tokens, parts_.routing.k};
    std::vector<mx::Shape> shapes = {shape};
    if (parts_.has_norm) {
      shapes.insert(shapes.end(), {shape, {square_blocks(shape.back())}});
    }
    shapes.insert(
        shapes.end(),
        {{tokens, static_cast<int>(parts_.places()), inputs[MixtureParts::triple(kGate)].shape(-2)}, chosen, chosen});
    return shapes;
  }

  std::optional<Arrays> with_sum(const Arrays& inputs, const mx::array& residual, const mx::array& weight) override {
    if (parts_.has_norm || leading_size(inputs[0], 1) != 1) {
      return std::nullopt;
    }
    MixtureParts parts = parts_;
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
    const QuantizedFormat& format = parts_.format;
    const mx::array x = parts_.row ? compose_row({inputs[0], inputs[parts_.squares()]}, *parts_.row, s) : inputs[0];
    const auto router_bias = parts_.has_router_bias ? std::optional(inputs[parts_.router_bias()]) : std::nullopt;
    const auto choice = chosen_experts(inputs[MixtureParts::logits], router_bias, parts_.routing, s);
    const mx::array indices = mx::stop_gradient(choice.first, s);
    const auto triple = [&](int i) { return inputs.begin() + static_cast<ptrdiff_t>(MixtureParts::triple(i)); };
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
    return inputs[0].shape(-1) == 0 || inputs[MixtureParts::triple(kGate)].shape(-2) == 0;
  }

  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    copies = inputs;
    for (size_t i : {size_t(0), MixtureParts::logits}) {
      copies[i] = contiguous_rows(inputs[i], stream());
    }
    for (size_t i = MixtureParts::triple(parts_.has_shared ? kAllTriples : kTriples); i < inputs.size(); ++i) {
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
    first.input(inputs[MixtureParts::logits])
        .input_if(has_router_bias, inputs[has_router_bias ? parts_.router_bias() : 0]);
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
        add_view(launch, inputs[MixtureParts::triple(triple) + i]);
      } else {
        launch.stand_in(inputs[MixtureParts::triple(triple - kSharedGate) + i]);
      }
    }
  }

  void add_bias(Launch& launch, const Arrays& inputs, int i) const {
    launch.input_if(parts_.has_bias, inputs[parts_.has_bias ? parts_.bias(i) : 0]);
  }

  // Of a launch with `places` places along the third axis of its grid.
  MixtureParams params_of(const Arrays& inputs, int triple, uint32_t places) const {
    const size_t first = MixtureParts::triple(triple);
    MixtureParams params{};
    QuantizedParams& weights = params.experts.weights;
    weights = quantized_params(inputs[first], inputs[first + 1], inputs[first + 2], parts_.format);
    weights.matrices = places;
    weights.rows = 1;
    weights.columns =
        static_cast<uint32_t>(triple == kDown ? inputs[MixtureParts::triple(kGate)].shape(-2) : inputs[0].shape(-1));
    weights.outputs = static_cast<uint32_t>(inputs[first].shape(-2));
    weights.has_bias = parts_.has_bias;
    params.experts.pairs_per_sum = parts_.places();
    params.route = route_params(parts_.routing, inputs[MixtureParts::logits].shape(-1), parts_.has_router_bias);
    return params;
  }

  void share_strides(Arrays& arrays, const std::vector<int>& stacks, const std::vector<int>& alone) {
    const size_t model = MixtureParts::triple(stacks.front());
    bool are_alike = true;
    for (size_t i = 0; i < 3; ++i) {
      const mx::array& of_model = arrays[model + i];
      for (int triple : stacks) {
        are_alike = are_alike && arrays[MixtureParts::triple(triple) + i].strides() == of_model.strides();
      }
      for (int triple : alone) {
        are_alike = are_alike && arrays[MixtureParts::triple(triple) + i].strides(0) == of_model.strides(1);
      }
    }
    for (const auto& triples : {stacks, alone}) {
      for (int triple : triples) {
        const size_t first = MixtureParts::triple(triple);
        if (are_alike && is_prepared_triple(arrays[first], arrays[first + 1], arrays[first + 2])) {
          continue;
        }
        for (size_t i = 0; i < 3; ++i) {
          arrays[first + i] = contiguous_rows(arrays[first + i], stream());
        }
      }
    }
  }

  MixtureParts parts_;
};

}  // namespace

mx::array mixture_by_kernels(const MixtureParts& parts, Arrays inputs, mx::Stream stream) {
  check_base<Mixture>();
  return Mixture::result_of(std::make_shared<Mixture>(stream, parts), std::move(inputs));
}

mx::array mixture_of_parts(const MixtureParts& parts, const Arrays& inputs, mx::Stream stream) {
  return std::make_shared<Mixture>(stream, parts)->of_parts(inputs);
}

}  // namespace mittens
