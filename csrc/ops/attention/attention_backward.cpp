#include "ops/attention/attention_backward.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "cpu/attention/attention_backward.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_backward_launch.h"
#include "runtime/array_layout.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"

namespace mittens {

namespace {

bool has_kernels_on(mx::Stream stream) {
  return stream.device == mx::Device::gpu || simulator_enabled();
}

// Inputs: queries, keys, values, a mask of four dimensions that broadcast, sinks, y, logsumexp, dy. Outputs: the
// gradients that are wanted, in the order of the inputs.
class AttentionBackward : public KernelPrimitive {
 public:
  AttentionBackward(mx::Stream stream, const AttentionOptions& options, const WantedGradients& wanted)
      : KernelPrimitive(stream), options_(options), wanted_(wanted) {}

  static Arrays apply(Arrays inputs, const AttentionOptions& options, const WantedGradients& wanted,
                      mx::Stream stream) {
    check_base<AttentionBackward>();
    auto primitive = std::make_shared<AttentionBackward>(stream, options, wanted);
    std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
    std::vector<mx::Dtype> dtypes(shapes.size(), inputs[0].dtype());
    return mx::array::make_arrays(std::move(shapes), dtypes, primitive, inputs);
  }

  const char* name() const override {
    return "MittensScaledDotProductAttentionVjp";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& backward = static_cast<const AttentionBackward&>(other);
    return options_ == backward.options_ && wanted_ == backward.wanted_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes;
    for (int i : wanted_inputs()) {
      shapes.push_back(inputs[i].shape());
    }
    return shapes;
  }

  // The new axis joins the batch, unless a gradient is a sum over the batch.
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    const bool one_mask = options_.has_mask && inputs[3].shape(axes[3] == 0 ? 1 : 0) == 1;
    const int batch = inputs[0].shape(axes[0] == 0 ? 1 : 0);
    if (wanted_.sinks || (wanted_.mask && one_mask && batch != 1) || (options_.has_sinks && axes[sinks_index()] >= 0)) {
      return KernelPrimitive::vmap(inputs, axes);
    }
    const int size = mapped_size(inputs, axes);
    Arrays batched = inputs;
    for (int i = 0; i < static_cast<int>(inputs.size()); ++i) {
      if (i == sinks_index()) {
        continue;
      }
      batched[i] = joined_batch(inputs[i], axes[i], size, batch, stream());
    }
    Arrays outputs = apply(std::move(batched), options_, wanted_, stream());
    for (mx::array& output : outputs) {
      output = mx::unflatten(output, 0, {size, batch}, stream());
    }
    return {outputs, std::vector<int>(outputs.size(), 0)};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    const mx::Shape scores = {inputs[0].shape(0), inputs[0].shape(1), inputs[0].shape(2), inputs[1].shape(2)};
    const bool by_kernels = has_kernels_on(stream());
    for (int i = 0; i < static_cast<int>(inputs.size()); ++i) {
      copies.push_back(i == mask_index()                              ? broadcast_mask(inputs[i], scores, stream())
                       : i == sinks_index() || i == logsumexp_index() ? contiguous_rows(inputs[i], stream())
                       : by_kernels                                   ? with_near_rows(inputs[i], stream())
                                                                      : with_rows(inputs[i], 1, stream()));
    }
    return copies;
  }

  bool sums_nothing(const Arrays& inputs) const override {
    return inputs[1].shape(2) == 0 || inputs.back().size() == 0;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::Shape &q = inputs[0].shape(), &v = inputs[2].shape();
    // A graph that was made for the CPU's native code may run in the simulator, a compiled one with other shapes.
    if (q[3] != v[3] || q[3] != attention_backward_width(q, v)) {
      checks::fail("scaled_dot_product_attention", "has a gradient where native code or other shapes were expected: ",
                   "no kernel covers heads of width ", q[3], " with values of width ", v[3]);
    }
    const BackwardArrays arrays{inputs[0],
                                inputs[1],
                                inputs[2],
                                options_.has_mask ? &inputs[mask_index()] : nullptr,
                                options_.has_sinks ? &inputs[sinks_index()] : nullptr,
                                inputs[logsumexp_index() - 1],
                                inputs[logsumexp_index()],
                                inputs.back()};
    return attention_backward_launches(arrays, outputs, options_, wanted_, stream());
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& q = inputs[0];
    cpu::AttentionBackward call{};
    call.forward.type = native_type(q.dtype());
    call.forward.batch = q.shape(0);
    call.forward.heads = q.shape(1);
    call.forward.key_heads = inputs[1].shape(1);
    call.forward.queries = q.shape(2);
    call.forward.keys = inputs[1].shape(2);
    call.forward.width = q.shape(3);
    call.forward.value_width = inputs[2].shape(3);
    call.forward.q = native_view(q);
    call.forward.k.rows = native_view(inputs[1]);
    call.forward.v.rows = native_view(inputs[2]);
    if (options_.has_mask) {
      const mx::array& mask = inputs[mask_index()];
      call.forward.mask = {mask.dtype() == mx::bool_ ? cpu::MaskKind::boolean : cpu::MaskKind::additive,
                           native_view(mask), mask.strides(3)};
    }
    call.forward.sinks = options_.has_sinks ? data_of(inputs[sinks_index()]) : nullptr;
    call.forward.scale = options_.scale;
    call.forward.causal = options_.causal;
    call.forward.window = options_.window;
    call.y = native_view(inputs[logsumexp_index() - 1]);
    call.logsumexp = inputs[logsumexp_index()].data<float>();
    call.dy = native_view(inputs.back());
    size_t next = 0;
    call.dq = wanted_.queries ? data_of(outputs[next++]) : nullptr;
    call.dk = wanted_.keys ? data_of(outputs[next++]) : nullptr;
    call.dv = wanted_.values ? data_of(outputs[next++]) : nullptr;
    if (wanted_.mask) {
      std::copy_n(outputs[next].shape().begin(), 4, call.mask_sizes);
      call.dmask = data_of(outputs[next++]);
    }
    call.dsinks = wanted_.sinks ? data_of(outputs[next]) : nullptr;
    return [call] { cpu::attention_backward(call); };
  }

  Arrays composed(const Arrays& inputs) override {
    DenseAttention call{inputs[0], inputs[1], inputs[2], std::nullopt, std::nullopt, options_};
    if (options_.has_mask) {
      call.mask = inputs[mask_index()];
    }
    if (options_.has_sinks) {
      call.sinks = inputs[sinks_index()];
    }
    const AttentionGradients gradients = attention_gradients(call, inputs.back(), wanted_, stream());
    Arrays outputs;
    for (const auto* gradient :
         {&gradients.queries, &gradients.keys, &gradients.values, &gradients.mask, &gradients.sinks}) {
      if (*gradient) {
        outputs.push_back(**gradient);
      }
    }
    return outputs;
  }

 private:
  // Places of the inputs; -1 where there is none.
  int mask_index() const {
    return options_.has_mask ? 3 : -1;
  }
  int sinks_index() const {
    return options_.has_sinks ? 3 + options_.has_mask : -1;
  }
  int logsumexp_index() const {
    return 4 + options_.has_mask + options_.has_sinks;
  }

  std::vector<int> wanted_inputs() const {
    std::vector<int> inputs;
    for (const auto& [wanted, index] :
         {std::pair(wanted_.queries, 0), std::pair(wanted_.keys, 1), std::pair(wanted_.values, 2),
          std::pair(wanted_.mask, mask_index()), std::pair(wanted_.sinks, sinks_index())}) {
      if (wanted) {
        inputs.push_back(index);
      }
    }
    return inputs;
  }

  static cpu::AttentionView native_view(const mx::array& array) {
    return {data_of(array), array.strides(0), array.strides(1), array.strides(2)};
  }

  AttentionOptions options_;
  WantedGradients wanted_;
};

}  // namespace

bool attention_backward_covers(const DenseAttention& call, mx::Stream stream) {
  const bool has_columns = call.queries.shape(3) > 0 && call.values.shape(3) > 0;
  return call.options.bits == 0 && has_columns &&
         (!has_kernels_on(stream) || attention_backward_width(call.queries.shape(), call.values.shape()) != 0);
}

AttentionGradients attention_backward(const DenseAttention& call, const mx::array& y, const mx::array& logsumexp,
                                      const mx::array& dy, const WantedGradients& wanted, mx::Stream stream) {
  const int width = has_kernels_on(stream) ? attention_backward_width(call.queries.shape(), call.values.shape()) : 0;
  const auto padded = [&](const mx::array& rows) {
    const int missing = width - rows.shape(3);
    return missing > 0 ? mx::pad(rows, {3}, {0}, {missing}, mx::array(0, rows.dtype()), "constant", stream) : rows;
  };
  Arrays inputs = {padded(call.queries), padded(call.keys), padded(call.values)};
  if (call.mask) {
    inputs.push_back(*call.mask);
  }
  if (call.sinks) {
    inputs.push_back(*call.sinks);
  }
  // Second derivatives follow from the composition, which does not read the results.
  inputs.push_back(mx::stop_gradient(padded(y), stream));
  inputs.push_back(mx::stop_gradient(logsumexp, stream));
  inputs.push_back(padded(dy));
  const Arrays outputs = AttentionBackward::apply(std::move(inputs), call.options, wanted, stream);
  size_t next = 0;
  const auto take = [&](bool is_wanted, const mx::array& of) -> std::optional<mx::array> {
    if (!is_wanted) {
      return std::nullopt;
    }
    const mx::array& gradient = outputs[next++];
    return gradient.shape() == of.shape() ? gradient : mx::slice(gradient, mx::Shape(4, 0), of.shape(), stream);
  };
  AttentionGradients gradients;
  gradients.queries = take(wanted.queries, call.queries);
  gradients.keys = take(wanted.keys, call.keys);
  gradients.values = take(wanted.values, call.values);
  gradients.mask = take(wanted.mask, wanted.mask ? *call.mask : call.queries);
  gradients.sinks = take(wanted.sinks, wanted.sinks ? *call.sinks : call.queries);
  return gradients;
}

mx::array composed_logsumexp(const DenseAttention& call, mx::Stream s) {
  constexpr int64_t most_scores = 1 << 23;  // of the queries that are taken at once
  const int batch = call.queries.shape(0), heads = call.queries.shape(1), queries = call.queries.shape(2);
  const int key_heads = call.keys.shape(1), ratio = heads / key_heads, keys = call.keys.shape(2);
  const mx::array minus_infinity(-std::numeric_limits<float>::infinity());
  const mx::array k = mx::swapaxes(mx::astype(call.keys, mx::float32, s), -1, -2, s);
  const auto rows_of = [&](const mx::array& a, int first, int last) {
    mx::Shape start(4, 0), stop = a.shape();
    start[2] = first;
    stop[2] = last;
    return mx::slice(a, start, stop, s);
  };
  const int step = static_cast<int>(
      std::clamp<int64_t>(most_scores / std::max<int64_t>(int64_t(batch) * heads * keys, 1), 1, std::max(queries, 1)));
  Arrays parts;
  for (int first = 0; first < queries; first += step) {
    const int last = std::min(first + step, queries);
    mx::array q = mx::astype(rows_of(call.queries, first, last), mx::float32, s);
    q = mx::reshape(mx::multiply(q, mx::array(call.options.scale), s),
                    {batch, key_heads, ratio * (last - first), call.queries.shape(3)}, s);
    if (!parts.empty()) {
      q = mx::depends({q}, {parts.back()})[0];
    }
    mx::array scores = mx::reshape(mx::matmul(q, k, s), {batch, heads, last - first, keys}, s);
    std::optional<mx::array> visible = seen_keys(call.options, first, last, queries, keys, s);
    if (call.mask) {
      mx::array mask = call.mask->shape(2) == 1 ? *call.mask : rows_of(*call.mask, first, last);
      if (mask.dtype() != mx::bool_) {
        scores = mx::add(scores, mx::astype(mask, mx::float32, s), s);
        mask = mx::not_equal(mask, mx::astype(minus_infinity, mask.dtype(), s), s);
      }
      visible = visible ? mx::logical_and(*visible, mask, s) : mask;
    }
    if (visible) {
      scores = mx::where(*visible, scores, minus_infinity, s);
    }
    // mx's gradient of a logsumexp of nothing but minus infinity is NaN, also where nobody asks for it.
    const mx::array is_hidden = mx::isneginf(mx::max(scores, -1, true, s), s);
    mx::array sums = mx::logsumexp(mx::where(is_hidden, mx::array(0.0f), scores, s), -1, false, s);
    sums = mx::where(mx::squeeze(is_hidden, -1, s), minus_infinity, sums, s);
    if (call.sinks) {
      sums = mx::logaddexp(sums, mx::reshape(mx::astype(*call.sinks, mx::float32, s), {1, heads, 1}, s), s);
    }
    parts.push_back(sums);
  }
  return parts.size() == 1 ? parts[0] : mx::concatenate(parts, 2, s);
}

}  // namespace mittens
