// The op quantized_scaled_dot_product_attention.
#include <array>
#include <limits>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "mlx/ops.h"
#include "ops/attention/attention.h"
#include "ops/attention/plan.h"
#include "ops/attention/row_keys.h"
#include "ops/attention/unpack.h"
#include "ops/matmul/quantized_weights.h"
#include "python/registry.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "quantized_scaled_dot_product_attention";

using Triple = PackedRows;

// By mx's attention over keys and values that are unpacked first.
AttentionCall unpacked_call(const AttentionCall& call, mx::Stream s) {
  AttentionCall result = call;
  for (Arrays* rows : {&result.keys, &result.values}) {
    *rows = Arrays(1, unpacked_rows(*rows, call.options.group_size, call.options.bits, s));
  }
  result.options.bits = 0;
  return result;
}

// For calls without a kernel: two products and a softmax, in the type of the queries, as in mlx-lm.
mx::array by_mx(const AttentionCall& call, mx::Stream s) {
  if (call.options.is_ragged()) {
    return or_nan(by_mx(with_mask_of_rows(call, s), s), call.starts, call.ends, call.keys[0].shape(2), s);
  }
  const mx::Dtype dtype = call.queries.dtype();
  const mx::Shape scores_shape = call.scores_shape();
  const int batch = scores_shape[0], heads = scores_shape[1], queries = scores_shape[2], keys = scores_shape[3];
  const int key_heads = call.keys[0].shape(1), ratio = heads / key_heads;
  const auto product = [&](const mx::array& x, const Arrays& rows, bool transpose) {
    return quantized_matmul_of_mx(x, rows[0], rows[1], rows[2], transpose, call.options.group_size, call.options.bits,
                                  "affine", s);
  };
  const mx::array scaled = mx::multiply(call.queries, mx::array(call.options.scale, dtype), s);
  mx::array scores = mx::reshape(
      product(mx::reshape(scaled, {batch, key_heads, ratio * queries, call.queries.shape(3)}, s), call.keys, true),
      scores_shape, s);
  std::optional<mx::array> seen = seen_keys(call.options, 0, queries, queries, keys, s);
  const std::optional<mx::array> sees = seeing_queries(call, s);
  if (call.mask) {
    scores = call.mask->dtype() == mx::bool_ ? scores : mx::add(scores, *call.mask, s);
    const mx::array shown = shown_by(*call.mask, s);
    seen = seen ? mx::logical_and(*seen, shown, s) : shown;
  }
  if (seen) {
    scores = mx::where(*seen, scores, mx::array(-std::numeric_limits<float>::infinity(), dtype), s);
  }
  if (sees) {
    scores = mx::where(*sees, scores, mx::array(0.0f, dtype), s);  // a softmax of -infinity alone is NaN
  }
  if (call.sinks) {
    const mx::array each = mx::reshape(*call.sinks, {1, heads, 1, 1}, s);
    const mx::array sinks = mx::broadcast_to(each, {batch, heads, queries, 1}, s);
    scores = mx::softmax(mx::concatenate({sinks, scores}, -1, s), -1, true, s);
    scores = mx::slice(scores, {0, 0, 0, 1}, {batch, heads, queries, keys + 1}, s);
  } else {
    scores = mx::softmax(scores, -1, true, s);
  }
  mx::array y = product(mx::reshape(scores, {batch, key_heads, ratio * queries, keys}, s), call.values, false);
  y = mx::reshape(y, {batch, heads, queries, y.shape(-1)}, s);
  return sees ? mx::where(*sees, y, mx::array(0.0f, dtype), s) : y;
}

AttentionCall checked(const mx::array& queries, const Triple& q_keys, const Triple& q_values, float scale,
                      const MaskArgument& mask, int group_size, int bits, const std::optional<mx::array>& sinks,
                      std::optional<int> window, bool exact, const std::optional<mx::array>& starts,
                      const std::optional<mx::array>& ends, mx::Stream stream) {
  quantized_format(op, group_size, bits, true);
  if (queries.ndim() != 4) {
    checks::fail(op, "queries has shape ", queries.shape(), ": expected four dimensions");
  }
  const mx::Shape keys_shape = check_packed_rows(op, "q_keys", q_keys, group_size, bits);
  const mx::Shape values_shape = check_packed_rows(op, "q_values", q_values, group_size, bits);
  check_heads(op, queries.shape(), keys_shape, values_shape);
  const auto& [key_words, key_scales, key_biases] = q_keys;
  const auto& [value_words, value_scales, value_biases] = q_values;
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"queries", queries},
                                                    {"q_keys' scales", key_scales},
                                                    {"q_keys' biases", key_biases},
                                                    {"q_values' scales", value_scales},
                                                    {"q_values' biases", value_biases}});
  auto typed = [&](const mx::array& array) { return in_dtype(array, dtype, stream); };
  AttentionCall call{.queries = typed(queries),
                     .keys = {key_words, typed(key_scales), typed(key_biases)},
                     .values = {value_words, typed(value_scales), typed(value_biases)},
                     .options = {.scale = scale, .bits = bits, .group_size = group_size, .exact = exact}};
  take_mask(op, call, mask, window, stream);
  take_sinks(op, call, sinks, stream);
  take_row_keys(op, call, starts, ends, stream);
  return call;
}

AttentionResult attended(AttentionCall call, mx::Stream stream) {
  const mx::Shape keys = unpacked(call.keys[0], call.options.bits),
                  values = unpacked(call.values[0], call.options.bits);
  const AttentionSizes sizes = attention_sizes(call.queries.shape(), keys, values);
  const bool unpacks = unpacks_first(sizes, call.options, call.queries.dtype(), stream);
  AttentionResult result = attend(op, std::move(call), stream);
  const auto* left = std::get_if<AttentionCall>(&result);
  return left && !left->options.exact && unpacks ? attention_by_mx(unpacked_call(*left, stream), stream)
                                                 : std::move(result);
}

// end: whether the call is computed in any case, or where kernels cover it.
template <typename Result, auto end>
Result attention_of(const mx::array& queries, const Triple& q_keys, const Triple& q_values, float scale,
                    const MaskArgument& mask, int group_size, int bits, const std::optional<mx::array>& sinks,
                    std::optional<int> window, bool exact, const std::optional<mx::array>& starts,
                    const std::optional<mx::array>& ends, bool return_logsumexp, mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  AttentionCall call =
      checked(queries, q_keys, q_values, scale, mask, group_size, bits, sinks, window, exact, starts, ends, stream);
  if (return_logsumexp) {
    return with_logsumexp(op, std::move(call), by_mx, stream);
  }
  return end(attended(std::move(call), stream), by_mx, stream);
}

void bind(nb::module_& module) {
  define(module, op, &attention_of<std::optional<AttentionOutput>, found_in>, &attention_of<AttentionOutput, finished>,
         "queries"_a, "q_keys"_a, "q_values"_a, "scale"_a, "mask"_a.none() = nb::none(), "group_size"_a = 64,
         "bits"_a = 8, nb::kw_only(), "sinks"_a.none() = nb::none(), "window"_a.none() = nb::none(), "exact"_a = false,
         "starts"_a.none() = nb::none(), "ends"_a.none() = nb::none(), "return_logsumexp"_a = false,
         "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
