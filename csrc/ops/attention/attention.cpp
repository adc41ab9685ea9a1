// The op scaled_dot_product_attention, and the checks of arguments that attention ops share.
#include "ops/attention/attention.h"

#include <algorithm>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "mlx/fast.h"
#include "mlx/ops.h"
#include "ops/attention/attention_backward.h"
#include "ops/attention/plan.h"
#include "ops/attention/row_keys.h"
#include "ops/attention/window_mask.h"
#include "ops/matmul/quantized_weights.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/numerics.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "scaled_dot_product_attention";

// Why a call of these shapes, in elements, cannot run on the stream, or an empty string.
std::string not_covered(const mx::Shape& queries, const mx::Shape& values, mx::Dtype dtype,
                        const AttentionOptions& options, mx::Stream stream) {
  const int bits = options.bits;
  if (!has_kernels(dtype)) {
    return "float64";
  }
  if (bits != 0 && bits != 4 && bits != 8) {
    return std::to_string(bits) + " bits";
  }
  const bool kernels = stream.device == mx::Device::gpu || simulator_enabled();
  return kernels ? attention_not_covered(queries, values, bits) : "";
}

bool has_empty(const mx::Shape& shape) {
  return std::count(shape.begin(), shape.end(), 0) > 0;
}

}  // namespace

mx::Shape unpacked(const mx::array& rows, int bits) {
  mx::Shape shape = rows.shape();
  if (bits) {
    shape.back() = static_cast<int>(int64_t(shape.back()) * 32 / bits);
  }
  return shape;
}

int AttentionCall::value_width() const {
  return unpacked(values[0], options.bits).back();
}

mx::Shape AttentionCall::scores_shape() const {
  return {queries.shape(0), queries.shape(1), queries.shape(2), keys[0].shape(2)};
}

void check_heads(const char* op, const mx::Shape& queries, const mx::Shape& keys, const mx::Shape& values) {
  if (keys[0] != queries[0] || values[0] != queries[0]) {
    checks::fail(op, "queries have shape ", queries, ", keys ", keys, ", values ", values,
                 ": expected the same batch size");
  }
  if (keys[3] != queries[3]) {
    checks::fail(op, "queries have shape ", queries, ", keys ", keys, ": expected the same last dimension");
  }
  if (keys[1] != values[1]) {
    checks::fail(op, "keys have ", keys[1], " heads, values have ", values[1], ": expected the same number");
  }
  if (keys[2] != values[2]) {
    checks::fail(op, "there are ", keys[2], " keys and ", values[2], " values: expected the same number");
  }
  if (queries[1] == 0 || keys[1] == 0 || queries[1] % keys[1] != 0) {
    checks::fail(op, "queries have ", queries[1], " heads, keys have ", keys[1], ": expected a multiple");
  }
}

mx::Shape check_packed_rows(const char* op, const char* name, const PackedRows& triple, int group_size, int bits) {
  const auto& [words, scales, biases] = triple;
  check_packed_heads(op, name, words, scales, biases);
  const mx::Shape shape = unpacked(words, bits);
  mx::Shape groups = shape;
  groups.back() = shape.back() / group_size;
  if (shape.back() % group_size != 0 || scales.shape() != groups || biases.shape() != groups) {
    checks::fail(op, name, " has words of shape ", words.shape(), ", scales of ", scales.shape(), " and biases of ",
                 biases.shape(), "; the words are ", shape.back(), " integers of ", bits,
                 " bits a row: expected scales and biases of ", groups, " for groups of ", group_size);
  }
  return shape;
}

void take_mask(const char* op, AttentionCall& call, const MaskArgument& argument, std::optional<int> window,
               mx::Stream stream) {
  if (window) {
    if (*window < 1) {
      checks::fail(op, "window is ", *window, ": expected None or a positive number of keys");
    }
    constexpr int no_window = 1 << 30;  // kernels add it to the number of a key
    call.options.window = std::min(*window, no_window);
  }
  if (const auto* mode = std::get_if<std::string>(&argument)) {
    if (*mode != "causal") {
      checks::fail(op, "mask is '", *mode, "': expected 'causal', an array or None");
    }
    call.options.causal = true;
  }
  const auto* given = std::get_if<mx::array>(&argument);
  if (!given) {
    return;
  }
  mx::array mask = *given;
  const mx::Dtype dtype = call.queries.dtype();
  if (mx::promote_types(mask.dtype(), dtype) != dtype) {
    checks::fail<DtypeError>(op, "mask has dtype ", mask.dtype(), ": expected bool, or one that promotes to ", dtype);
  }
  const mx::Shape scores = call.scores_shape();
  const auto known = window ? std::nullopt : known_mask(mask);
  if (known && mask.shape(-2) == scores[2] && mask.shape(-1) == scores[3] &&
      (!known->starts || mask.shape(0) == scores[0])) {
    call.options.window = known->window;
    call.starts = known->starts;
    call.options.causal = call.options.has_starts = known->starts.has_value();
    return;
  }
  const int missing = 4 - static_cast<int>(mask.ndim());
  bool broadcasts = missing >= 0;
  for (int axis = std::max(missing, 0); axis < 4 && broadcasts; ++axis) {
    broadcasts = mask.shape(axis - missing) == 1 || mask.shape(axis - missing) == scores[axis];
  }
  if (!broadcasts) {
    checks::fail(op, "mask has shape ", mask.shape(), ": expected one that broadcasts to ", scores);
  }
  if (missing > 0) {
    mx::Shape shape(missing, 1);
    shape.insert(shape.end(), mask.shape().begin(), mask.shape().end());
    mask = mx::reshape(mask, shape, stream);
  }
  call.mask = mask.dtype() == mx::bool_ ? mask : mx::astype(mask, dtype, stream);
  call.options.has_mask = true;
}

void take_sinks(const char* op, AttentionCall& call, const std::optional<mx::array>& sinks, mx::Stream stream) {
  if (!sinks) {
    return;
  }
  const mx::Dtype dtype = call.queries.dtype();
  if (mx::promote_types(sinks->dtype(), dtype) != dtype) {
    checks::fail<DtypeError>(op, "sinks has dtype ", sinks->dtype(), ": expected one that promotes to ", dtype);
  }
  if (sinks->ndim() != 1 || sinks->shape(0) != call.queries.shape(1)) {
    checks::fail(op, "sinks has shape ", sinks->shape(), ": expected one number for each of ", call.queries.shape(1),
                 " heads");
  }
  call.sinks = in_dtype(*sinks, dtype, stream);
  call.options.has_sinks = true;
}

std::optional<mx::array> seen_keys(const AttentionOptions& options, int first, int last, int queries, int keys,
                                   mx::Stream s) {
  if (!options.causal && options.window == 0) {
    return std::nullopt;
  }
  const int offset = keys - queries;
  const mx::array query = mx::expand_dims(mx::arange(first + offset, last + offset, mx::int32, s), 1, s);
  const mx::array key = mx::expand_dims(mx::arange(0, keys, mx::int32, s), 0, s);
  const mx::array seen = mx::less_equal(key, query, s);
  if (options.window == 0) {
    return seen;
  }
  return mx::logical_and(seen, mx::greater(mx::add(key, mx::array(options.window), s), query, s), s);
}

mx::array shown_by(const mx::array& mask, mx::Stream s) {
  return mask.dtype() == mx::bool_ ? mask : mx::not_equal(mask, mx::array(-INFINITY, mask.dtype()), s);
}

mx::array any_of_row(const mx::array& seen, mx::Stream s) {
  return mx::any(seen, -1, true, s);
}

std::optional<mx::array> seeing_queries(const AttentionCall& call, mx::Stream s) {
  const mx::Shape scores = call.scores_shape();
  std::optional<mx::array> seen;
  if (call.mask || scores[2] > scores[3]) {
    seen = seen_keys(call.options, 0, scores[2], scores[2], scores[3], s);
  }
  if (call.mask) {
    const mx::array shown = shown_by(*call.mask, s);
    seen = seen ? mx::logical_and(*seen, shown, s) : shown;
  }
  return seen ? std::optional(any_of_row(*seen, s)) : std::nullopt;
}

namespace {

// An exact call is never left to mx for speed, nor one that asks for the kernel.
bool prefer_mx_attention(const char* op, const AttentionSizes& sizes, const AttentionOptions& options, mx::Dtype dtype,
                         bool force_fused, mx::Stream stream) {
  if (options.exact || force_fused) {
    return is_switched_off(op);
  }
  return prefer_mx(attention_problem(op, sizes, options, dtype), why_mx_attention(sizes, options, dtype, stream),
                   stream);
}

}  // namespace

bool is_of_nothing(const AttentionCall& call) {
  const mx::Shape scores = call.scores_shape();
  return scores[3] == 0 || has_empty({scores[0], scores[1], scores[2], call.value_width()});
}

std::string attention_missing(const AttentionCall& call, mx::Stream stream) {
  const mx::Shape values = unpacked(call.values[0], call.options.bits);
  std::string missing = not_covered(call.queries.shape(), values, call.queries.dtype(), call.options, stream);
  if (!missing.empty()) {
    return missing;
  }
  const AttentionSizes sizes = attention_sizes(call.queries.shape(), call.keys[0].shape(), values);
  const char* reason = why_not_launched(sizes, call.mask ? call.mask->size() : 0, stream);
  return reason ? reason : "";
}

mx::array logsumexp_of_nothing(const AttentionCall& call, mx::Stream s) {
  const mx::Shape scores = call.scores_shape();
  const mx::array sums =
      call.sinks ? mx::reshape(mx::astype(*call.sinks, mx::float32, s), {1, scores[1], 1}, s) : mx::array(-INFINITY);
  return mx::broadcast_to(sums, {scores[0], scores[1], scores[2]}, s);
}

namespace {

enum class Computed { nowhere, by_mx, by_kernels };  // nowhere: there is nothing to compute

// Chooses who computes a call; counts the reason if it is mx.
Computed choose(const char* op, AttentionCall& call, mx::Stream stream) {
  call.options.exact = call.options.exact || is_exact();
  if (is_of_nothing(call)) {
    return Computed::nowhere;
  }
  if (std::string missing = attention_missing(call, stream); !missing.empty()) {
    fallback(op, std::move(missing));
    return Computed::by_mx;
  }
  const mx::Shape values = unpacked(call.values[0], call.options.bits);
  const AttentionSizes sizes = attention_sizes(call.queries.shape(), call.keys[0].shape(), values);
  const bool prefers = prefer_mx_attention(op, sizes, call.options, call.queries.dtype(), call.force_fused, stream);
  return prefers ? Computed::by_mx : Computed::by_kernels;
}

mx::array attention_of_nothing(const AttentionCall& call, mx::Stream s) {
  const mx::Shape scores = call.scores_shape();
  const mx::array y = mx::zeros({scores[0], scores[1], scores[2], call.value_width()}, call.queries.dtype(), s);
  return or_nan(y, call.starts, call.ends, scores[3], s);
}

DenseAttention dense(const AttentionCall& call, mx::Stream s) {
  const auto rows = [&](const Arrays& arrays) {
    return call.options.bits ? mx::dequantize(arrays[0], arrays[1], arrays[2], call.options.group_size,
                                              call.options.bits, "affine", std::nullopt, std::nullopt, s)
                             : arrays[0];
  };
  DenseAttention result{call.queries, rows(call.keys), rows(call.values), call.mask, call.sinks, call.options};
  return call.options.is_ragged() ? with_mask_of_rows(result, call.starts, call.ends, s) : result;
}

}  // namespace

AttentionResult attend(const char* op, AttentionCall call, mx::Stream stream) {
  switch (choose(op, call, stream)) {
    case Computed::nowhere:
      return attention_of_nothing(call, stream);
    case Computed::by_mx:
      return call;
    case Computed::by_kernels:
      break;
  }
  return apply_attention(std::move(call), stream);
}

namespace {

mx::array slice_axis(const mx::array& a, int axis, int begin, int end, mx::Stream s) {
  mx::Shape start(a.ndim(), 0), stop = a.shape();
  start[axis] = begin;
  stop[axis] = end;
  return mx::slice(a, start, stop, s);
}

// mx's result for each query and the keys in its range alone.
mx::array query_by_query(const AttentionCall& call, ByMx by_mx, mx::Stream s) {
  if (call.options.is_ragged()) {
    checks::fail(op, "exact is True, and no kernel covers the call: expected no starts and ends");
  }
  const mx::Shape scores = call.scores_shape();
  const int queries = scores[2], keys = scores[3];
  const bool causal = call.options.causal || call.options.window;
  Arrays rows;
  for (int i = 0; i < queries; ++i) {
    const int end = causal ? std::clamp(keys - queries + i + 1, 0, keys) : keys;
    if (end == 0) {
      rows.push_back(mx::zeros({scores[0], scores[1], 1, call.value_width()}, call.queries.dtype(), s));
      continue;
    }
    AttentionCall row = call;
    row.queries = slice_axis(call.queries, 2, i, i + 1, s);
    for (Arrays* arrays : {&row.keys, &row.values}) {
      for (mx::array& array : *arrays) {
        array = slice_axis(array, 2, 0, end, s);
      }
    }
    if (call.mask) {
      row.mask = call.mask->shape(2) == 1 ? *call.mask : slice_axis(*call.mask, 2, i, i + 1, s);
      row.mask = row.mask->shape(3) == 1 ? *row.mask : slice_axis(*row.mask, 3, 0, end, s);
    }
    rows.push_back(by_mx(row, s));
  }
  return mx::concatenate(rows, 2, s);
}

}  // namespace

mx::array finished(AttentionResult result, ByMx by_mx, mx::Stream stream) {
  if (auto* y = std::get_if<mx::array>(&result)) {
    return std::move(*y);
  }
  const auto& call = std::get<AttentionCall>(result);
  return call.options.exact ? query_by_query(call, by_mx, stream) : by_mx(call, stream);
}

std::optional<mx::array> found_in(AttentionResult result, ByMx by_mx, mx::Stream stream) {
  const auto* left = std::get_if<AttentionCall>(&result);
  return left && !left->options.exact ? std::nullopt : std::optional(finished(std::move(result), by_mx, stream));
}

AttentionWithLogsumexp with_logsumexp_by_mx(const AttentionCall& call, ByMx by_mx, mx::Stream stream) {
  const mx::Shape scores = call.scores_shape();
  const mx::array of_keys =
      has_empty(scores) ? logsumexp_of_nothing(call, stream) : composed_logsumexp(dense(call, stream), stream);
  const mx::array sums = or_nan(of_keys, call.starts, call.ends, scores[3], stream);
  return {is_of_nothing(call) ? attention_of_nothing(call, stream) : by_mx(call, stream), sums};
}

AttentionOutput with_logsumexp(const char* op, AttentionCall call, ByMx by_mx, mx::Stream stream) {
  const Computed computed = choose(op, call, stream);
  if (computed == Computed::by_kernels) {
    const Arrays both = apply_attention_with_logsumexp(std::move(call), stream);
    return std::tuple(both[0], both[1]);
  }
  if (call.options.exact && computed == Computed::by_mx) {
    checks::fail(op, "exact and return_logsumexp are True, and no kernel covers the call: expected one of them");
  }
  return with_logsumexp_by_mx(call, by_mx, stream);
}

// mx knows no window and no rows of different lengths: they become a mask.
mx::array attention_by_mx(const AttentionCall& call, mx::Stream s) {
  if (call.options.is_ragged()) {
    return or_nan(attention_by_mx(with_mask_of_rows(call, s), s), call.starts, call.ends, call.keys[0].shape(2), s);
  }
  std::optional<mx::array> mask = call.mask;
  std::string mode = call.options.causal ? "causal" : "";
  if (call.options.window) {
    mode = "";
    const mx::Shape scores = call.scores_shape();
    const mx::array seen = *seen_keys(call.options, 0, scores[2], scores[2], scores[3], s);
    mask = with_seen(mask, seen, s);
  }
  const std::optional<mx::array> sees = seeing_queries(call, s);
  if (sees && mask && mask->dtype() != mx::bool_) {
    mask = mx::where(*sees, *mask, mx::array(0.0f, mask->dtype()), s);  // NaN would reach the gradients of others
  }
#if MITTENS_MLX_HAS_FORCE_FUSED
  const mx::array y = mx::fast::scaled_dot_product_attention(
      call.queries, call.keys[0], call.values[0], call.options.scale, mode, mask, call.sinks, call.force_fused, s);
#else
  if (call.force_fused) {
    checks::fail(op, "force_fused is True, and no kernel covers the call: expected False, since the mx of mlx ",
                 MITTENS_MLX_VERSION, " has no such option (mlx 0.32.2 is the first that has it)");
  }
  const mx::array y = mx::fast::scaled_dot_product_attention(call.queries, call.keys[0], call.values[0],
                                                             call.options.scale, mode, mask, call.sinks, s);
#endif
  return sees ? mx::where(*sees, y, mx::array(0.0f, y.dtype()), s) : y;
}

namespace {

Arrays alone(mx::array array) {
  Arrays arrays;
  arrays.push_back(std::move(array));  // a list in braces would copy it
  return arrays;
}

}  // namespace

AttentionCall checked_attention(const char* op, const mx::array& q, const mx::array& k, const mx::array& v, float scale,
                                const MaskArgument& mask, const std::optional<mx::array>& sinks,
                                std::optional<int> window, bool force_fused, bool exact,
                                const std::optional<mx::array>& starts, const std::optional<mx::array>& ends,
                                mx::Stream stream) {
  for (const auto& [name, array] : {std::pair("q", &q), std::pair("k", &k), std::pair("v", &v)}) {
    if (array->ndim() != 4) {
      checks::fail(op, name, " has shape ", array->shape(), ": expected four dimensions");
    }
  }
  check_heads(op, q.shape(), k.shape(), v.shape());
  const mx::Dtype dtype = checks::floating(op, {{"q", q}, {"k", k}, {"v", v}});
  AttentionCall call{.queries = in_dtype(q, dtype, stream),
                     .keys = alone(in_dtype(k, dtype, stream)),
                     .values = alone(in_dtype(v, dtype, stream)),
                     .options = {.scale = scale, .exact = exact},
                     .force_fused = force_fused};
  take_mask(op, call, mask, window, stream);
  take_sinks(op, call, sinks, stream);
  take_row_keys(op, call, starts, ends, stream);
  return call;
}

namespace {

// end: whether the call is computed in any case, or where kernels cover it.
template <typename Result, auto end>
Result attention_of(const mx::array& q, const mx::array& k, const mx::array& v, float scale, const MaskArgument& mask,
                    const std::optional<mx::array>& sinks, std::optional<int> window, bool force_fused, bool exact,
                    const std::optional<mx::array>& starts, const std::optional<mx::array>& ends, bool return_logsumexp,
                    mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  AttentionCall call =
      checked_attention(op, q, k, v, scale, mask, sinks, window, force_fused, exact, starts, ends, stream);
  if (return_logsumexp) {
    return with_logsumexp(op, std::move(call), attention_by_mx, stream);
  }
  return end(attend(op, std::move(call), stream), attention_by_mx, stream);
}

void bind(nb::module_& module) {
  define(module, op, &attention_of<std::optional<AttentionOutput>, found_in>, &attention_of<AttentionOutput, finished>,
         "q"_a, "k"_a, "v"_a, nb::kw_only(), "scale"_a, "mask"_a.none() = nb::none(), "sinks"_a.none() = nb::none(),
         "window"_a.none() = nb::none(), "force_fused"_a = false, "exact"_a = false, "starts"_a.none() = nb::none(),
         "ends"_a.none() = nb::none(), "return_logsumexp"_a = false, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

std::shared_ptr<mx::Primitive> try_attention_primitive(const mx::Shape& q, const mx::Shape& k, const mx::Shape& v,
                                                       mx::Dtype dtype, AttentionOptions options, mx::Stream stream) {
  const char* const op = options.bits ? "quantized_scaled_dot_product_attention" : mittens::op;
  check_heads(op, q, k, v);
  if (has_empty(q) || has_empty(k) || has_empty(v)) {
    return nullptr;
  }
  options.exact = is_exact();
  if (std::string reason = not_covered(q, v, dtype, options, stream); !reason.empty()) {
    fallback(op, std::move(reason));
    return nullptr;
  }
  if (prefer_mx_attention(op, attention_sizes(q, k, v), options, dtype, false, stream)) {
    return nullptr;
  }
  return attention_primitive(options, stream);
}

}  // namespace mittens
