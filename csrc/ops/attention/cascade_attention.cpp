#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "cpu/attention/cascade_attention.h"
#include "mlx/ops.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_backward.h"
#include "ops/attention/attention_composed.h"
#include "ops/attention/row_keys.h"
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

constexpr const char* op = "cascade_attention";
constexpr const char* attention_op = "scaled_dot_product_attention";

// Results over parts of the keys, weighted by their sums of e^score. A row that sees no key of either is 0.
mx::array merged(const AttentionWithLogsumexp& first, const AttentionWithLogsumexp& second, mx::Stream s) {
  const mx::array total = mx::logaddexp(std::get<1>(first), std::get<1>(second), s);
  const mx::array base = mx::where(mx::isneginf(total, s), mx::array(0.0f), total, s);
  const auto weighted = [&](const AttentionWithLogsumexp& part) {
    const auto& [y, sums] = part;
    const mx::array weights = mx::expand_dims(mx::exp(mx::subtract(sums, base, s), s), -1, s);
    return mx::multiply(mx::astype(y, mx::float32, s), weights, s);
  };
  return mx::astype(mx::add(weighted(first), weighted(second), s), std::get<0>(first).dtype(), s);
}

// [batch, heads, queries, ..] to [1, heads, batch * queries, ..].
mx::array joined(const mx::array& rows, mx::Stream s) {
  return mx::expand_dims(mx::flatten(mx::swapaxes(rows, 0, 1, s), 1, 2, s), 0, s);
}

// Results of joined queries, in the shape of these queries.
AttentionWithLogsumexp parted(const AttentionWithLogsumexp& joined, const mx::array& queries, mx::Stream s) {
  const auto part = [&](const mx::array& rows) {
    const mx::Shape sizes = {queries.shape(0), queries.shape(2)};
    return mx::swapaxes(mx::unflatten(mx::squeeze(rows, 0, s), 1, sizes, s), 0, 1, s);
  };
  return {part(std::get<0>(joined)), part(std::get<1>(joined))};
}

// Whether rows of a batch lie behind each other as the rows of one sequence do.
bool are_joinable(const mx::array& queries) {
  return queries.shape(0) == 1 || queries.shape(2) == 1 || queries.strides(0) == queries.shape(2) * queries.strides(2);
}

// The queries themselves, or copied to [batch, queries, heads, width].
mx::array with_joinable_rows(const mx::array& queries, mx::Stream s) {
  if (are_joinable(queries) && has_rows(queries, 16)) {
    return queries;
  }
  const auto swapped = [](const mx::array& a) {
    mx::Shape shape = a.shape();
    mx::Strides strides = a.strides();
    std::swap(shape[1], shape[2]);
    std::swap(strides[1], strides[2]);
    mx::array view(shape, a.dtype(), nullptr, {});
    view.copy_shared_buffer(a, strides, {}, a.data_size());
    return view;
  };
  return swapped(contiguous(swapped(queries), s));
}

mx::array joined_view(const mx::array& queries) {
  const mx::Shape& shape = queries.shape();
  const int64_t row = shape[2] == 1 ? queries.strides(0) : queries.strides(2);
  mx::array view({1, shape[1], shape[0] * shape[2], shape[3]}, queries.dtype(), nullptr, {});
  view.copy_shared_buffer(queries, {0, queries.strides(1), row, queries.strides(3)}, {}, queries.data_size());
  return view;
}

// y [batch, heads, queries, value width]. Inputs: the inputs of attention over a row's own keys, as the primitive of
// attention has them, then keys and values of the prefix [1, key heads, prefix, ..].
class CascadeAttention : public KernelPrimitive {
 public:
  CascadeAttention(mx::Stream stream, AttentionOptions own, AttentionOptions prefix)
      : KernelPrimitive(stream), own_(own), prefix_(prefix) {}

  const char* name() const override {
    return "MittensCascadeAttention";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& cascade = static_cast<const CascadeAttention&>(other);
    return own_ == cascade.own_ && prefix_ == cascade.prefix_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {with_columns(inputs[0].shape(), inputs[2].shape(3))};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    copies.push_back(with_joinable_rows(inputs[0], stream()));
    for (int i = 1; i < static_cast<int>(inputs.size()); ++i) {
      const bool has_rows = i < 3 || i >= prefix_index(inputs);
      copies.push_back(has_rows                  ? with_rows(inputs[i], 16, stream())
                       : i == 3 && own_.has_mask ? broadcast_mask(inputs[i], scores_shape(inputs), stream())
                                                 : contiguous_rows(inputs[i], stream()));
    }
    return copies;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::Shape& queries = inputs[0].shape();
    if (const std::string missing = attention_not_covered(queries, outputs[0].shape(), 0); !missing.empty()) {
      checks::fail(op, "was called where native code or other shapes were expected: no kernel covers ", missing);
    }
    const auto first = inputs.begin() + prefix_index(inputs);
    return cascade_launches({joined_view(inputs[0]), first[0], first[1]}, prefix_, Arrays(inputs.begin(), first), own_,
                            outputs[0], stream());
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const auto first = inputs.begin() + prefix_index(inputs);
    const cpu::Attention prefix = native_attention({joined_view(inputs[0]), first[0], first[1]}, prefix_);
    const Arrays rows(inputs.begin(), first);
    cpu::Attention own = native_attention(rows, own_);
    own.y = data_of(outputs[0]);
    const cpu::RaggedKeys keys = native_keys(rows, own_);
    return [prefix, own, keys] { cpu::cascade_attention(prefix, own, keys); };
  }

  Arrays composed(const Arrays& inputs) override {
    const auto first = inputs.begin() + prefix_index(inputs);
    int next = 3;
    const auto given = [&](bool is_there) { return is_there ? std::optional(inputs[next++]) : std::nullopt; };
    DenseAttention own{inputs[0], inputs[1], inputs[2], given(own_.has_mask), given(own_.has_sinks), own_};
    const std::optional<mx::array> starts = given(own_.has_starts), ends = given(own_.has_ends);
    const int keys = inputs[1].shape(2);
    if (own_.is_ragged()) {
      own = with_mask_of_rows(own, starts, ends, stream());
    }
    const DenseAttention prefix{joined(inputs[0], stream()), first[0], first[1], std::nullopt, std::nullopt, prefix_};
    const auto both = [&](const DenseAttention& call) {
      return std::tuple(composed_attention(call, stream()), composed_logsumexp(call, stream()));
    };
    return {
        or_nan(merged(parted(both(prefix), inputs[0], stream()), both(own), stream()), starts, ends, keys, stream())};
  }

 private:
  static int prefix_index(const Arrays& inputs) {
    return static_cast<int>(inputs.size()) - 2;
  }

  static mx::Shape scores_shape(const Arrays& inputs) {
    return {inputs[0].shape(0), inputs[0].shape(1), inputs[0].shape(2), inputs[1].shape(2)};
  }

  AttentionOptions own_;
  AttentionOptions prefix_;
};

mx::array cascade_attention(const mx::array& q, const mx::array& k, const mx::array& v, const mx::array& prefix_k,
                            const mx::array& prefix_v, float scale, const MaskArgument& mask,
                            const std::optional<mx::array>& sinks, const std::optional<mx::array>& starts,
                            const std::optional<mx::array>& ends, mx::StreamOrDevice where) {
  const mx::Stream s = checks::checked_stream(op, where);
  for (const auto& [name, array] : {std::pair("q", &q), std::pair("k", &k), std::pair("v", &v),
                                    std::pair("prefix_k", &prefix_k), std::pair("prefix_v", &prefix_v)}) {
    if (array->ndim() != 4) {
      checks::fail(op, name, " has shape ", array->shape(), ": expected four dimensions");
    }
  }
  if (prefix_k.shape(0) != 1 || prefix_v.shape(0) != 1) {
    checks::fail(op, "prefix_k has shape ", prefix_k.shape(), ", prefix_v ", prefix_v.shape(),
                 ": expected a batch of one, which all rows share");
  }
  if (prefix_k.shape(1) != k.shape(1) || prefix_v.shape(3) != v.shape(3)) {
    checks::fail(op, "prefix_k has shape ", prefix_k.shape(), ", prefix_v ", prefix_v.shape(), ", k ", k.shape(),
                 ", v ", v.shape(), ": expected the same heads and widths");
  }
  const mx::Dtype dtype =
      checks::floating(op, {{"q", q}, {"k", k}, {"v", v}, {"prefix_k", prefix_k}, {"prefix_v", prefix_v}});
  const auto typed = [&](const mx::array& a) { return in_dtype(a, dtype, s); };
  AttentionCall own = checked_attention(op, typed(q), typed(k), typed(v), scale, mask, sinks, std::nullopt, false,
                                        false, starts, ends, s);
  AttentionCall prefix = checked_attention(op, joined(own.queries, s), typed(prefix_k), typed(prefix_v), scale, {},
                                           std::nullopt, std::nullopt, false, false, std::nullopt, std::nullopt, s);
  const mx::Shape shape = with_columns(q.shape(), v.shape(3));
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) {
    return mx::zeros(shape, dtype, s);
  }
  own.options.exact = prefix.options.exact = is_exact();
  const bool has_parts = !is_of_nothing(own) && !is_of_nothing(prefix);
  bool by_mx = false;
  if (has_parts) {
    std::string missing = attention_missing(own, s);
    missing = missing.empty() ? attention_missing(prefix, s) : missing;
    by_mx = !missing.empty();
    if (by_mx) {
      fallback(op, std::move(missing));
    }
  }
  by_mx = by_mx || is_switched_off(op);
  if (by_mx && is_exact()) {
    checks::fail(op, "is to be exact, and no kernel computes the call: expected scaled_dot_product_attention");
  }
  if (has_parts && !by_mx) {
    own.options.leaves_parts = prefix.options.leaves_parts = true;
    auto primitive = std::make_shared<CascadeAttention>(s, own.options, prefix.options);
    Arrays inputs = attention_inputs(std::move(own));
    inputs.push_back(std::move(prefix.keys[0]));
    inputs.push_back(std::move(prefix.values[0]));
    return only_output(std::move(shape), std::move(primitive), std::move(inputs));
  }
  const mx::array queries = own.queries;
  const auto both = [&](AttentionCall call) {
    return by_mx ? with_logsumexp_by_mx(call, attention_by_mx, s)
                 : std::get<1>(with_logsumexp(attention_op, std::move(call), attention_by_mx, s));
  };
  return merged(parted(both(std::move(prefix)), queries, s), both(std::move(own)), s);
}

void bind(nb::module_& module) {
  bind_function(module, op, &cascade_attention, "q"_a, "k"_a, "v"_a, "prefix_k"_a, "prefix_v"_a, nb::kw_only(),
                "scale"_a, "mask"_a.none() = nb::none(), "sinks"_a.none() = nb::none(), "starts"_a.none() = nb::none(),
                "ends"_a.none() = nb::none(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
