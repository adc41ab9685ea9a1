// The primitive of attention over dense and quantized keys: launches, native code and derivatives.
#include <algorithm>
#include <iterator>
#include <utility>

#include "cpu/attention/ragged_attention.h"
#include "mlx/ops.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_backward.h"
#include "ops/attention/attention_backward_launch.h"
#include "ops/attention/attention_composed.h"
#include "ops/attention/plan.h"
#include "ops/attention/row_keys.h"
#include "ops/cache/cache_step.h"
#include "runtime/array_layout.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"

namespace mittens {

namespace {

enum class Logsumexp { none, for_gradients, output };

// y [batch, heads, queries, value width] = softmax(scale * q k^T, masked) v. Inputs: queries; keys, or their words,
// scales and biases; values likewise; a mask of four dimensions that broadcast; sinks; starts; ends.
class Attention : public KernelPrimitive {
 public:
  // logsumexp: whether there is a second output, and its use.
  Attention(mx::Stream stream, AttentionOptions options, Logsumexp logsumexp = Logsumexp::none)
      : KernelPrimitive(stream), options_(options), logsumexp_(logsumexp) {}

  static mx::array apply(AttentionCall call, mx::Stream stream) {
    const AttentionOptions options = call.options;
    return apply(attention_inputs(std::move(call)), options, stream);
  }

  static Arrays apply_with_logsumexp(AttentionCall call, mx::Stream stream) {
    const AttentionOptions options = call.options;
    return results(attention_inputs(std::move(call)), options, Logsumexp::output, stream);
  }

  const char* name() const override {
    return options_.bits ? "MittensQuantizedScaledDotProductAttention" : "MittensScaledDotProductAttention";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& attention = static_cast<const Attention&>(other);
    return options_ == attention.options_ && logsumexp_ == attention.logsumexp_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes = {shape_of_y(inputs)};
    if (has_logsumexp()) {
      shapes.push_back({shapes[0][0], shapes[0][1], shapes[0][2]});
    }
    return shapes;
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override {
    WantedGradients wanted;
    for (int argument : argnums) {
      check_differentiable(argument);
    }
    if (options_.is_ragged() || logsumexp_ == Logsumexp::output) {
      return KernelPrimitive::vjp(primals, cotangents, argnums, outputs);
    }
    for (int argument : argnums) {
      wanted.queries |= argument == 0;
      wanted.keys |= argument == first_key();
      wanted.values |= argument == first_value();
      wanted.mask |= argument == mask_index() && is_additive(primals[argument]);
      wanted.sinks |= argument == sinks_index();
    }
    const AttentionGradients gradients = gradients_of(primals, cotangents[0], wanted, outputs);
    Arrays result;
    for (int argument : argnums) {
      result.push_back(argument == 0               ? *gradients.queries
                       : argument == first_key()   ? *gradients.keys
                       : argument == first_value() ? *gradients.values
                       : argument == sinks_index() ? *gradients.sinks
                       : wanted.mask               ? *gradients.mask
                                                   : mx::zeros_like(primals[argument], stream()));
    }
    return result;
  }

  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override {
    for (int argument : argnums) {
      check_differentiable(argument);
    }
    return KernelPrimitive::jvp(primals, tangents, argnums);
  }

  // The new axis joins the batch; sinks are the same for all of a batch.
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    if (options_.has_sinks && axes[sinks_index()] >= 0) {
      return KernelPrimitive::vmap(inputs, axes);
    }
    const int size = mapped_size(inputs, axes);
    const int batch = inputs[0].shape(axes[0] == 0 ? 1 : 0);
    Arrays batched = inputs;
    for (int i = 0; i < static_cast<int>(inputs.size()); ++i) {
      const bool shared = axes[i] < 0;
      if (i == sinks_index() || (i == mask_index() && shared && inputs[i].shape(0) == 1)) {
        continue;
      }
      batched[i] = joined_batch(inputs[i], axes[i], size, batch, stream());
    }
    if (why_not_launched(batched)) {
      return KernelPrimitive::vmap(inputs, axes);
    }
    Arrays outputs = results(std::move(batched), options_, logsumexp_, stream());
    for (mx::array& output : outputs) {
      output = mx::unflatten(output, 0, {size, batch}, stream());
    }
    return {outputs, std::vector<int>(outputs.size(), 0)};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    // The kernels load 16 bytes at once, of scales and biases single elements.
    const auto alignment = [this](int i) { return options_.bits == 0 || i == 0 || i % 3 == 1 ? 16 : 1; };
    bool as_is = !options_.has_mask;
    for (int i = 0; i < after_values() && as_is; ++i) {
      as_is = has_rows(inputs[i], alignment(i));
    }
    for (int i = after_mask(); i < static_cast<int>(inputs.size()) && as_is; ++i) {
      as_is = is_contiguous(inputs[i]);
    }
    if (as_is) {
      return inputs;
    }
    for (int i = 0; i < after_values(); ++i) {
      copies.push_back(with_rows(inputs[i], alignment(i), stream()));
    }
    if (options_.has_mask) {
      copies.push_back(broadcast_mask(inputs[mask_index()], scores_shape(inputs), stream()));
    }
    for (int i = after_mask(); i < static_cast<int>(inputs.size()); ++i) {
      copies.push_back(contiguous_rows(inputs[i], stream()));
    }
    return copies;
  }

  bool sums_nothing(const Arrays& inputs) const override {
    return inputs[first_key()].shape(2) == 0 || inputs[first_value()].shape(3) == 0;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    // A graph that was made for the CPU's native code may run in the simulator, a compiled one with other shapes.
    std::string missing = attention_not_covered(inputs[0].shape(), outputs[0].shape(), options_.bits);
    if (const char* reason = why_not_launched(inputs); missing.empty() && reason) {
      missing = reason;
    }
    if (!missing.empty()) {
      checks::fail(op(), "was called where native code or other shapes were expected: no kernel covers ", missing);
    }
    return attention_launches(inputs, outputs[0], has_logsumexp() ? &outputs[1] : nullptr, options_, stream());
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    cpu::Attention call = native_attention(inputs, options_);
    call.y = data_of(outputs[0]);
    call.logsumexp = has_logsumexp() ? outputs[1].data<float>() : nullptr;
    if (!options_.is_ragged()) {
      return [call] { cpu::attention(call); };
    }
    const cpu::RaggedKeys keys = native_keys(inputs, options_);
    return [call, keys] { cpu::ragged_attention(call, keys); };
  }

  Arrays composed(const Arrays& inputs) override {
    DenseAttention call = dense(inputs);
    std::optional<mx::array> starts, ends;
    if (options_.is_ragged()) {
      starts = options_.has_starts ? std::optional(inputs[starts_index()]) : std::nullopt;
      ends = options_.has_ends ? std::optional(inputs.back()) : std::nullopt;
      call = with_mask_of_rows(call, starts, ends, stream());
    }
    Arrays outputs = {composed_attention(call, stream())};
    if (has_logsumexp()) {
      outputs.push_back(composed_logsumexp(call, stream()));
    }
    for (mx::array& output : outputs) {
      output = or_nan(output, starts, ends, call.keys.shape(2), stream());
    }
    return outputs;
  }

 private:
  static mx::array apply(Arrays inputs, const AttentionOptions& options, mx::Stream stream) {
    // MLX does not say whether it traces for gradients. A graph that is compiled or mapped has a row's logsumexp too.
    const bool is_traced = std::any_of(inputs.begin(), inputs.end(), [](const mx::array& a) { return a.is_tracer(); });
    const bool has_columns = options.bits == 0 && inputs[0].shape(3) > 0 && inputs[2].shape(3) > 0;
    const bool for_gradients = is_traced && has_columns && !options.is_ragged();
    return results(std::move(inputs), options, for_gradients ? Logsumexp::for_gradients : Logsumexp::none, stream)[0];
  }

  static Arrays results(Arrays inputs, const AttentionOptions& options, Logsumexp logsumexp, mx::Stream stream) {
    auto primitive = std::make_shared<Attention>(stream, options, logsumexp);
    std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
    if (logsumexp == Logsumexp::none) {
      if (auto joined = join_step(inputs, primitive, shapes[0])) {
        return {*std::move(joined)};
      }
      return {only_output(std::move(shapes[0]), std::move(primitive), std::move(inputs))};
    }
    return mx::array::make_arrays(std::move(shapes), {inputs[0].dtype(), mx::float32}, primitive, inputs);
  }

  AttentionGradients gradients_of(const Arrays& primals, const mx::array& cotangent, const WantedGradients& wanted,
                                  const Arrays& outputs) {
    const DenseAttention call = dense(primals);
    if (!attention_backward_covers(call, stream())) {
      return attention_gradients(call, cotangent, wanted, stream());
    }
    if (has_logsumexp()) {
      return attention_backward(call, outputs[0], outputs[1], cotangent, wanted, stream());
    }
    const Arrays again = results(primals, options_, Logsumexp::for_gradients, stream());
    return attention_backward(call, again[0], again[1], cotangent, wanted, stream());
  }

  const char* op() const {
    return options_.bits ? "quantized_scaled_dot_product_attention" : "scaled_dot_product_attention";
  }

  mx::Shape shape_of_y(const Arrays& inputs) const {
    return with_columns(inputs[0].shape(), unpacked(inputs[first_value()], options_.bits).back());
  }

  // Places of the inputs; -1 where there is none.
  int first_key() const {
    return 1;
  }
  int first_value() const {
    return options_.bits ? 4 : 2;
  }
  int after_values() const {
    return options_.bits ? 7 : 3;
  }
  int mask_index() const {
    return options_.has_mask ? after_values() : -1;
  }
  int after_mask() const {
    return after_values() + options_.has_mask;
  }
  int sinks_index() const {
    return options_.has_sinks ? after_mask() : -1;
  }
  int starts_index() const {
    return after_mask() + options_.has_sinks;
  }

  bool has_logsumexp() const {
    return logsumexp_ != Logsumexp::none;
  }

  const char* why_not_launched(const Arrays& inputs) {
    const mx::Shape values = unpacked(inputs[first_value()], options_.bits);
    const AttentionSizes sizes = attention_sizes(inputs[0].shape(), inputs[first_key()].shape(), values);
    return mittens::why_not_launched(sizes, options_.has_mask ? inputs[mask_index()].size() : 0, stream());
  }

  DenseAttention dense(const Arrays& inputs) {
    auto rows = [&](int first) {
      return options_.bits ? mx::dequantize(inputs[first], inputs[first + 1], inputs[first + 2], options_.group_size,
                                            options_.bits, "affine", std::nullopt, std::nullopt, stream())
                           : inputs[first];
    };
    DenseAttention call{inputs[0], rows(first_key()), rows(first_value()), std::nullopt, std::nullopt, options_};
    if (options_.has_mask) {
      call.mask = inputs[mask_index()];
    }
    if (options_.has_sinks) {
      call.sinks = inputs[sinks_index()];
    }
    return call;
  }

  // A mask of bool that was computed from an array with a gradient passes none on.
  static bool is_additive(const mx::array& mask) {
    return mx::issubdtype(mask.dtype(), mx::floating);
  }

  void check_differentiable(int argument) const {
    if (options_.bits && argument > 0 && argument < after_values()) {
      checks::fail("quantized_scaled_dot_product_attention",
                   "has no gradients with respect to packed keys and values: expected those of queries, mask or sinks");
    }
  }

  mx::Shape scores_shape(const Arrays& inputs) const {
    return {inputs[0].shape(0), inputs[0].shape(1), inputs[0].shape(2), inputs[first_key()].shape(2)};
  }

  AttentionOptions options_;
  Logsumexp logsumexp_;
};

}  // namespace

Arrays attention_inputs(AttentionCall call) {
  Arrays inputs;
  inputs.reserve(11);  // packed keys and values, a mask, sinks, starts and ends
  inputs.push_back(std::move(call.queries));
  std::move(call.keys.begin(), call.keys.end(), std::back_inserter(inputs));
  std::move(call.values.begin(), call.values.end(), std::back_inserter(inputs));
  for (std::optional<mx::array>* more : {&call.mask, &call.sinks, &call.starts, &call.ends}) {
    if (*more) {
      inputs.push_back(std::move(**more));
    }
  }
  return inputs;
}

int mapped_size(const Arrays& inputs, const std::vector<int>& axes) {
  int size = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    size = axes[i] >= 0 ? inputs[i].shape(axes[i]) : size;
  }
  return size;
}

mx::array joined_batch(const mx::array& input, int axis, int size, int batch, mx::Stream stream) {
  const mx::array a = axis < 0 ? mx::expand_dims(input, 0, stream) : mx::moveaxis(input, axis, 0, stream);
  mx::Shape shape = a.shape();
  shape[0] = size;
  shape[1] = batch;
  return mx::flatten(mx::broadcast_to(a, shape, stream), 0, 1, stream);
}

mx::array broadcast_mask(const mx::array& given, const mx::Shape& shape, mx::Stream stream) {
  bool backwards = false;
  size_t last = 0;  // element, from the first
  for (int axis = 0; axis < 4; ++axis) {
    backwards |= given.strides(axis) < 0;
    last += size_t(given.shape(axis) - 1) * given.strides(axis);
  }
  const mx::array mask = backwards || last >= most_mask_elements ? contiguous(given, stream) : given;
  mx::Strides strides = mask.strides();
  for (int axis = 0; axis < 4; ++axis) {
    strides[axis] = mask.shape(axis) == 1 ? 0 : strides[axis];
  }
  mx::array view(shape, mask.dtype(), nullptr, {});
  view.copy_shared_buffer(mask, strides, {}, mask.data_size());
  return view;
}

mx::array apply_attention(AttentionCall call, mx::Stream stream) {
  return Attention::apply(std::move(call), stream);
}

Arrays apply_attention_with_logsumexp(AttentionCall call, mx::Stream stream) {
  return Attention::apply_with_logsumexp(std::move(call), stream);
}

std::shared_ptr<mx::Primitive> attention_primitive(const AttentionOptions& options, mx::Stream stream) {
  return std::make_shared<Attention>(stream, options);
}

}  // namespace mittens
