#include <algorithm>
#include <limits>
#include <optional>
#include <utility>
#include <variant>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include "mlx/ops.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_backward.h"
#include "ops/attention/attention_composed.h"
#include "ops/attention/plan.h"
#include "ops/attention/row_keys.h"
#include "ops/cache/paged.h"
#include "ops/matmul/quantized_weights.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/numerics.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "paged_attention";

int keys_of(const mx::array& pool, const mx::array& table) {
  return pool.shape(2) * table.shape(1);
}

// The rows of a pool that a table names, [batch, heads, keys, ..], zeros where `is_there` [batch, 1, keys, 1] is false.
mx::array gathered(const mx::array& pool, const mx::array& blocks, const mx::array& is_there, mx::Stream s) {
  const mx::array taken = mx::transpose(mx::take(pool, blocks, 0, s), {0, 2, 1, 3, 4}, s);
  return mx::where(is_there, mx::flatten(taken, 2, 3, s), mx::zeros({}, pool.dtype(), s), s);
}

// y [batch, heads, queries, value width], and if wanted the logsumexp [batch, heads, queries]. Inputs: queries; keys in
// blocks, or their words, scales and biases; values likewise; sinks; lengths; the table.
class PagedAttention : public KernelPrimitive {
 public:
  PagedAttention(mx::Stream stream, AttentionOptions options, bool has_logsumexp)
      : KernelPrimitive(stream), options_(options), has_logsumexp_(has_logsumexp) {}

  const char* name() const override {
    return "MittensPagedAttention";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& attention = static_cast<const PagedAttention&>(other);
    return options_ == attention.options_ && has_logsumexp_ == attention.has_logsumexp_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const mx::Shape shape = with_columns(inputs[0].shape(), unpacked(inputs[first_value()], options_.bits).back());
    std::vector<mx::Shape> shapes = {shape};
    if (has_logsumexp_) {
      shapes.push_back({shape[0], shape[1], shape[2]});
    }
    return shapes;
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override {
    check_differentiable(argnums);
    return KernelPrimitive::vjp(primals, cotangents, argnums, outputs);
  }

  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override {
    check_differentiable(argnums);
    return KernelPrimitive::jvp(primals, tangents, argnums);
  }

  // In mx operations.
  static Arrays compose(const Arrays& inputs, const AttentionOptions& options, bool has_logsumexp, mx::Stream s) {
    const size_t first_value = options.bits ? 4 : 2;
    const mx::array lengths = mx::stop_gradient(inputs.end()[-2], s), table = mx::stop_gradient(inputs.back(), s);
    const int block = inputs[1].shape(2), keys = keys_of(inputs[1], table);
    const mx::array named = are_blocks(table, inputs[1], s);
    const mx::array blocks = mx::where(named, table, mx::array(0), s);
    const mx::array is_named = mx::reshape(mx::repeat(named, block, 1, s), {table.shape(0), 1, 1, keys}, s);
    const mx::array key = mx::reshape(mx::arange(0, keys, mx::int32, s), {1, 1, 1, keys}, s);
    const mx::array within = mx::less(key, mx::reshape(lengths, {lengths.shape(0), 1, 1, 1}, s), s);
    const mx::array is_there = mx::swapaxes(mx::logical_and(is_named, within, s), 2, 3, s);
    const auto rows = [&](size_t first) {
      const auto part = [&](size_t i) { return gathered(inputs[first + i], blocks, is_there, s); };
      return options.bits ? mx::dequantize(part(0), part(1), part(2), options.group_size, options.bits, "affine",
                                           std::nullopt, std::nullopt, s)
                          : part(0);
    };
    AttentionOptions dense = options;
    dense.is_paged = false;
    dense.bits = 0;
    const auto sinks = options.has_sinks ? std::optional(inputs.end()[-3]) : std::nullopt;
    const DenseAttention call = with_mask_of_rows(
        DenseAttention{inputs[0], rows(1), rows(first_value), std::nullopt, sinks, dense}, std::nullopt, lengths, s);
    const mx::array seen = seen_by_rows(dense, std::nullopt, lengths, inputs[0].shape(2), keys, s);
    const mx::array lacks = any_of_row(mx::logical_and(seen, mx::logical_not(is_named, s), s), s);
    const auto known = [&](const mx::array& results) {
      const mx::array nan(std::numeric_limits<float>::quiet_NaN(), results.dtype());
      const mx::array of_results = results.ndim() == 3 ? mx::squeeze(lacks, -1, s) : lacks;
      return or_nan(mx::where(of_results, nan, results, s), std::nullopt, lengths, keys, s);
    };
    Arrays results = {known(composed_attention(call, s))};
    if (has_logsumexp) {
      results.push_back(known(composed_logsumexp(call, s)));
    }
    return results;
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    // The kernels load 16 bytes at once, of scales and biases single elements.
    const size_t after_values = options_.bits ? 7 : 3;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool is_wide = options_.bits == 0 || i == 0 || i % 3 == 1;
      copies.push_back(i < after_values         ? with_rows(inputs[i], is_wide ? 16 : 1, stream())
                       : i + 1 == inputs.size() ? with_rows(inputs[i], 1, stream())
                                                : contiguous_rows(inputs[i], stream()));
    }
    return copies;
  }

  bool sums_nothing(const Arrays& inputs) const override {
    return inputs[1].size() == 0 || inputs[first_value()].size() == 0 || inputs.back().size() == 0;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const std::string missing = paged_attention_not_covered(inputs[0].shape(), outputs[0].shape(), options_.bits);
    if (!missing.empty()) {
      checks::fail(op, "was called where native code or other shapes were expected: no kernel covers ", missing);
    }
    return attention_launches(inputs, outputs[0], has_logsumexp_ ? &outputs[1] : nullptr, options_, stream());
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    cpu::Attention call = native_attention(inputs, options_);
    call.y = data_of(outputs[0]);
    call.logsumexp = has_logsumexp_ ? outputs[1].data<float>() : nullptr;
    const cpu::RaggedKeys keys = native_keys(inputs, options_);
    return [call, keys] { cpu::ragged_attention(call, keys); };
  }

  Arrays composed(const Arrays& inputs) override {
    return compose(inputs, options_, has_logsumexp_, stream());
  }

 private:
  size_t first_value() const {
    return options_.bits ? 4 : 2;
  }

  void check_differentiable(const std::vector<int>& argnums) const {
    for (int argument : argnums) {
      if (options_.bits && argument > 0 && argument < 7) {
        checks::fail(op, "has no gradients with respect to packed keys and values: expected those of q or sinks");
      }
    }
  }

  AttentionOptions options_;
  bool has_logsumexp_;
};

AttentionOutput output_of(const Arrays& results) {
  return results.size() == 1 ? AttentionOutput(results[0]) : std::tuple(results[0], results[1]);
}

// The result of a call whose rows have no keys.
AttentionOutput output_of_nothing(const AttentionCall& call, const mx::Shape& shape, int keys, bool has_logsumexp,
                                  mx::Stream s) {
  const auto known = [&](const mx::array& results) { return or_nan(results, std::nullopt, call.ends, keys, s); };
  const mx::array y = known(mx::zeros(shape, call.queries.dtype(), s));
  return has_logsumexp ? AttentionOutput(std::tuple(y, known(logsumexp_of_nothing(call, s)))) : y;
}

// The pool's shape in elements.
mx::Shape check_pool(const char* name, const Pool& pool, int group_size, int bits) {
  if (const auto* packed = std::get_if<PackedRows>(&pool)) {
    return check_packed_rows(op, name, *packed, group_size, bits);
  }
  const auto& rows = std::get<mx::array>(pool);
  if (rows.ndim() != 4) {
    checks::fail(op, name, " has shape ", rows.shape(), ": expected four dimensions");
  }
  return rows.shape();
}

// The arrays of a pool, which would be copied whole where they were of another type than the queries.
Arrays checked_arrays(const char* name, const Pool& pool, mx::Dtype dtype) {
  Arrays arrays = arrays_of(pool);
  for (size_t i = is_packed(pool) ? 1 : 0; i < arrays.size(); ++i) {
    if (arrays[i].dtype() != dtype) {
      checks::fail<DtypeError>(op, name, " has an array of dtype ", arrays[i].dtype(), ", q has dtype ", dtype,
                               ": expected the same; convert q, as a pool would be copied");
    }
  }
  return arrays;
}

void check_shapes(const mx::Shape& queries, const mx::Shape& keys, const mx::Shape& values, const mx::array& table) {
  if (keys[0] != values[0] || keys[1] != values[1] || keys[2] != values[2]) {
    checks::fail(op, "key_blocks has shape ", keys, ", value_blocks ", values,
                 ": expected the same number of blocks, heads and keys of a block");
  }
  if (keys[3] != queries[3]) {
    checks::fail(op, "q has shape ", queries, ", key_blocks ", keys, ": expected the same last dimension");
  }
  if (queries[1] == 0 || keys[1] == 0 || queries[1] % keys[1] != 0) {
    checks::fail(op, "q has ", queries[1], " heads, key_blocks has ", keys[1], ": expected a multiple");
  }
  check_block_keys(op, keys[2]);
  check_block_table(op, table, queries[0]);
}

// Why no kernel covers a call that sums up something; empty where one does.
std::string missing_of(const AttentionCall& call, const mx::array& table, mx::Stream stream) {
  const int bits = call.options.bits;
  if (bits != 0 && bits != 4 && bits != 8) {
    return std::to_string(bits) + " bits";
  }
  if (stream.device != mx::Device::gpu && !simulator_enabled()) {
    return "";
  }
  if (bits == 4) {
    return "4 bits";
  }
  mx::Shape keys = call.keys[0].shape();
  const mx::Shape values = unpacked(call.values[0], bits);
  if (call.keys[0].size() > std::numeric_limits<uint32_t>::max() ||
      call.values[0].size() > std::numeric_limits<uint32_t>::max()) {
    return "a pool of 2**32 elements or more";
  }
  std::string missing = paged_attention_not_covered(call.queries.shape(), values, bits);
  keys[2] = keys_of(call.keys[0], table);
  const char* reason = why_not_launched(attention_sizes(call.queries.shape(), keys, values), 0, stream);
  return missing.empty() && reason ? reason : missing;
}

AttentionOutput paged_attention(const mx::array& q, const Pool& key_blocks, const Pool& value_blocks,
                                const mx::array& block_table, const mx::array& lengths, float scale,
                                const std::optional<std::string>& mask, const std::optional<mx::array>& sinks,
                                std::optional<int> window, int group_size, int bits, bool exact, bool return_logsumexp,
                                mx::StreamOrDevice where) {
  const mx::Stream s = checks::checked_stream(op, where);
  if (q.ndim() != 4) {
    checks::fail(op, "q has shape ", q.shape(), ": expected four dimensions");
  }
  check_both_packed(op, key_blocks, value_blocks);
  const bool packed = is_packed(key_blocks);
  if (packed) {
    quantized_format(op, group_size, bits, true);
  }
  const mx::Shape keys = check_pool("key_blocks", key_blocks, group_size, bits);
  const mx::Shape values = check_pool("value_blocks", value_blocks, group_size, bits);
  check_shapes(q.shape(), keys, values, block_table);
  check_numbers(op, "lengths", lengths, q.shape(0));
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"q", q}});
  AttentionCall call{.queries = q,
                     .keys = checked_arrays("key_blocks", key_blocks, dtype),
                     .values = checked_arrays("value_blocks", value_blocks, dtype),
                     .options = {.scale = scale,
                                 .bits = packed ? bits : 0,
                                 .group_size = packed ? group_size : 0,
                                 .exact = exact || is_exact()}};
  take_mask(op, call, mask ? MaskArgument(*mask) : MaskArgument(), window, s);
  take_sinks(op, call, sinks, s);
  call.ends = lengths;
  call.options.has_ends = call.options.is_paged = true;
  const mx::Shape shape = with_columns(q.shape(), values[3]);
  const bool has_keys = keys[0] > 0 && block_table.shape(1) > 0;
  if (!has_keys || std::count(shape.begin(), shape.end(), 0) > 0) {
    return output_of_nothing(call, shape, has_keys ? keys[2] * block_table.shape(1) : 0, return_logsumexp, s);
  }
  const bool has_width = q.shape(3) > 0;
  if (!has_width) {  // scores are 0, as with one column of zeros
    call.queries = mx::zeros({q.shape(0), q.shape(1), q.shape(2), 1}, dtype, s);
    call.keys = {mx::zeros({keys[0], keys[1], keys[2], 1}, dtype, s)};
  }
  std::string missing = has_width ? missing_of(call, block_table, s) : "";
  const bool by_mx = !has_width || !missing.empty() || is_switched_off(op);
  if (!missing.empty()) {
    fallback(op, std::move(missing));
  }
  if (by_mx && has_width && call.options.exact) {
    checks::fail(op, "is to be exact, and no kernel computes the call: expected scaled_dot_product_attention");
  }
  const AttentionOptions options = call.options;
  Arrays inputs = attention_inputs(std::move(call));
  inputs.push_back(block_table);
  if (by_mx) {
    return output_of(PagedAttention::compose(inputs, options, return_logsumexp, s));
  }
  auto primitive = std::make_shared<PagedAttention>(s, options, return_logsumexp);
  if (!return_logsumexp) {
    return only_output(std::move(shape), std::move(primitive), std::move(inputs));
  }
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  return output_of(mx::array::make_arrays(std::move(shapes), {dtype, mx::float32}, primitive, inputs));
}

void bind(nb::module_& module) {
  bind_function(module, op, &paged_attention, "q"_a, "key_blocks"_a, "value_blocks"_a, "block_table"_a, "lengths"_a,
                nb::kw_only(), "scale"_a, "mask"_a.none() = nb::none(), "sinks"_a.none() = nb::none(),
                "window"_a.none() = nb::none(), "group_size"_a = 64, "bits"_a = 8, "exact"_a = false,
                "return_logsumexp"_a = false, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
