#include <algorithm>
#include <bit>
#include <optional>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include "cpu/cache/paged_append.h"
#include "mlx/ops.h"
#include "ops/cache/buffer_copies.h"
#include "ops/cache/paged.h"
#include "ops/cache/rope_append.h"
#include "ops/cache/token_rows.h"
#include "ops/matmul/quantized_weights.h"
#include "params/cache.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "paged_append";
const Name file = "cache/paged_append.metal";

RowStrides strides_of(const mx::array& rows) {
  return {{rows.strides(0), rows.strides(1), rows.strides(2)}};
}

// Which new row each key of the pool gets, [blocks, keys of a block], -1 where none. blocks, within: [rows], where each
// goes; a block past the pool's last receives rows that go nowhere.
mx::array row_of_key(const mx::array& pool, const mx::array& blocks, const mx::array& within, mx::Stream s) {
  const int count = pool.shape(0), block = pool.shape(2);
  const mx::array none = mx::full({count + 1, block}, -1, mx::int32, s);
  const mx::array rows = mx::reshape(mx::arange(0, blocks.shape(0), mx::int32, s), {blocks.shape(0), 1, 1}, s);
  return mx::slice(mx::scatter(none, {blocks, within}, rows, {0, 1}, s), {0, 0}, {count, block}, s);
}

// The pool with new rows of [batch, heads, tokens, ..], in mx operations that have all derivatives.
mx::array with_rows_of(const mx::array& pool, const mx::array& fresh, const mx::array& sources, mx::Stream s) {
  if (pool.size() == 0) {
    return pool;
  }
  const mx::array rows = mx::flatten(mx::transpose(fresh, {0, 2, 1, 3}, s), 0, 1, s);  // [batch * tokens, heads, ..]
  const mx::array taken = mx::take(rows, mx::maximum(sources, mx::array(0), s), 0, s);
  const mx::array is_new = mx::expand_dims(mx::greater_equal(sources, mx::array(0), s), {1, 3}, s);
  return mx::where(is_new, mx::transpose(taken, {0, 2, 1, 3}, s), pool, s);
}

// Inputs: positions, the buffers of the pool, the table, new keys and values -> lengths and the buffers, in place where
// nobody else needs them.
class PagedAppend : public KernelPrimitive {
 public:
  PagedAppend(mx::Stream stream, Packing packing) : KernelPrimitive(stream), packing_(packing) {}

  const char* name() const override {
    return "MittensPagedAppend";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return packing_ == static_cast<const PagedAppend&>(other).packing_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    std::vector<mx::Shape> shapes;
    for (size_t i = 0; i <= buffers(); ++i) {
      shapes.push_back(inputs[i].shape());
    }
    return shapes;
  }

  // Results without elements come in one type.
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    auto mapped = KernelPrimitive::vmap(inputs, axes);
    for (size_t i = 0; i < mapped.first.size(); ++i) {
      mapped.first[i] = in_dtype(mapped.first[i], inputs[i].dtype(), stream());
    }
    return mapped;
  }

  static Arrays compose(const Arrays& inputs, const Packing& packing, mx::Stream s) {
    const size_t each = buffers_of(packing) / 2;
    const mx::array positions = mx::stop_gradient(inputs[0], s), table = mx::stop_gradient(inputs[1 + 2 * each], s);
    const mx::array& pool = inputs[1];
    const mx::array* fresh = &inputs[2 + 2 * each];
    const int tokens = fresh[0].shape(tokens_axis), block = pool.shape(2), entries = table.shape(1);
    const mx::array index = mx::reshape(mx::arange(0, tokens, mx::int32, s), {1, tokens}, s);
    const mx::array at = mx::add(mx::expand_dims(positions, 1, s), index, s);
    const mx::array in_table =
        mx::logical_and(mx::greater_equal(at, mx::array(0), s), mx::less(at, mx::array(entries * block), s), s);
    const mx::array safe = mx::where(in_table, at, mx::array(0), s);
    const mx::array entry =
        mx::take_along_axis(table, mx::right_shift(safe, mx::array(std::countr_zero(uint32_t(block))), s), 1, s);
    const mx::array goes = mx::logical_and(in_table, are_blocks(entry, pool, s), s);
    const mx::array blocks = mx::flatten(mx::where(goes, entry, mx::array(pool.shape(0)), s), 0, 1, s);
    const mx::array within = mx::flatten(mx::bitwise_and(safe, mx::array(block - 1), s), 0, 1, s);
    const mx::array sources = row_of_key(pool, blocks, within, s);
    Arrays outputs = {mx::add(positions, mx::array(tokens), s)};
    for (size_t which = 0; which < 2; ++which) {
      const Arrays rows = packing.bits == 0
                              ? Arrays{fresh[which]}
                              : mx::quantize(fresh[which], packing.group_size, packing.bits, "affine", std::nullopt, s);
      for (size_t i = 0; i < each; ++i) {
        outputs.push_back(with_rows_of(inputs[1 + which * each + i], rows[i], sources, s));
      }
    }
    return outputs;
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool is_buffer = i >= 1 && i <= buffers();
      copies.push_back(is_buffer ? inputs[i]
                       : i == 0  ? contiguous_rows(inputs[i], stream())
                                 : with_rows(inputs[i], 1, stream()));
    }
    return copies;
  }

  // A buffer may lie in another order than its axes: one of MLX's views of a whole array.
  void allocate(const Arrays& inputs, Arrays& outputs) override {
    allocate_output(outputs[0], stream());
    const size_t holders = 1 + outputs[0].siblings().size();
    for (size_t i = 1; i <= buffers(); ++i) {
      const mx::array& donor = inputs[i];
      const bool is_whole = donor.flags().contiguous && donor.data_size() == donor.size() &&
                            (donor.shape(3) == 1 || donor.strides(3) == 1);
      if (is_whole && is_donatable(donor, holders)) {
        outputs[i].copy_shared_buffer(donor);
      } else {
        allocate_output(outputs[i], stream());
      }
    }
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& keys = new_rows(inputs, 0);
    const mx::array& values = new_rows(inputs, 1);
    const size_t each = buffers() / 2;
    const PagedAppendParams params{
        .new_keys = strides_of(keys),
        .new_values = strides_of(values),
        .keys = strides_of(outputs[1]),
        .values = strides_of(outputs[1 + each]),
        .key_heads = static_cast<uint32_t>(keys.shape(1)),
        .tokens = static_cast<uint32_t>(keys.shape(tokens_axis)),
        .width = static_cast<uint32_t>(keys.shape(3)),
        .value_width = static_cast<uint32_t>(values.shape(3)),
        .blocks = static_cast<uint32_t>(outputs[1].shape(0)),
        .block_shift = block_shift(inputs),
        .table_entries = static_cast<uint32_t>(table(inputs).shape(1)),
        .table_row = static_cast<uint32_t>(table_row(inputs)),
    };
    constexpr uint32_t simdgroups = 4;  // of a threadgroup, each with a head or a group
    const uint32_t items = is_packed() ? params.key_heads * ((params.width + params.value_width) / packing_.group_size)
                                       : 2 * params.key_heads;
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(keys.dtype(), is_packed() ? "quantized_paged" : "paged", "append");
    launch.threadgroups = {static_cast<uint32_t>(keys.shape(0)) * std::max(params.tokens, 1u),
                           std::max(ceil_divide(items, simdgroups), 1u), 1};
    launch.threads = {32 * simdgroups, 1, 1};
    launch.input(inputs[0]);
    add_view(launch, table(inputs));
    add_view(launch, keys);
    add_view(launch, values);
    launch.output(outputs[0]);
    for (size_t i = 1; i <= buffers(); ++i) {
      launch.update(outputs[i]);
    }
    if (is_packed()) {
      launch.params(QuantizedPagedAppendParams{.append = params,
                                               .key_scales = strides_of(outputs[2]),
                                               .key_biases = strides_of(outputs[3]),
                                               .value_scales = strides_of(outputs[5]),
                                               .value_biases = strides_of(outputs[6]),
                                               .group_size = static_cast<uint32_t>(packing_.group_size),
                                               .bits = static_cast<uint32_t>(packing_.bits)});
    } else {
      launch.params(params);
    }
    std::vector<Launch> all = buffer_copies(inputs, outputs, buffers());
    all.push_back(std::move(launch));
    return all;
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& keys = new_rows(inputs, 0);
    const mx::array& values = new_rows(inputs, 1);
    const auto heads = [](const mx::array& a) {
      return cpu::Heads{data_of(a), {a.strides(0), a.strides(1), a.strides(2)}};
    };
    const auto rows = [&](size_t i) {
      mx::array& a = outputs[i];
      return cpu::PoolRows{data_of(a), {a.strides(0), a.strides(1), a.strides(2)}};
    };
    const auto pool = [&](size_t first) {
      return is_packed() ? cpu::Pool{rows(first), rows(first + 1), rows(first + 2)} : cpu::Pool{rows(first), {}, {}};
    };
    const cpu::PagedAppend call{
        .type = native_type(keys.dtype()),
        .positions = inputs[0].data<int32_t>(),
        .table = table(inputs).data<int32_t>(),
        .table_entries = static_cast<size_t>(table(inputs).shape(1)),
        .table_row = static_cast<size_t>(table_row(inputs)),
        .blocks = static_cast<size_t>(outputs[1].shape(0)),
        .block_shift = block_shift(inputs),
        .new_keys = heads(keys),
        .new_values = heads(values),
        .keys = pool(1),
        .values = pool(1 + buffers() / 2),
        .lengths = outputs[0].data<int32_t>(),
        .batch = static_cast<size_t>(keys.shape(0)),
        .key_heads = static_cast<size_t>(keys.shape(1)),
        .tokens = static_cast<size_t>(keys.shape(tokens_axis)),
        .width = static_cast<size_t>(keys.shape(3)),
        .value_width = static_cast<size_t>(values.shape(3)),
        .group_size = static_cast<size_t>(packing_.group_size),
        .bits = static_cast<size_t>(packing_.bits),
    };
    return [call, copy = native_buffer_copies(inputs, outputs, buffers())] {
      copy();
      cpu::paged_append(call);
    };
  }

  Arrays composed(const Arrays& inputs) override {
    return compose(inputs, packing_, stream());
  }

 private:
  size_t buffers() const {
    return buffers_of(packing_);
  }
  bool is_packed() const {
    return packing_.bits != 0;
  }
  const mx::array& table(const Arrays& inputs) const {
    return inputs[1 + buffers()];
  }
  int64_t table_row(const Arrays& inputs) const {
    return table(inputs).shape(0) == 1 ? 0 : table(inputs).strides(0);
  }
  const mx::array& new_rows(const Arrays& inputs, size_t which) const {
    return inputs[2 + buffers() + which];
  }
  static uint32_t block_shift(const Arrays& inputs) {
    return static_cast<uint32_t>(std::countr_zero(static_cast<uint32_t>(inputs[1].shape(2))));
  }

  Packing packing_;
};

using Result = std::tuple<Pool, Pool, mx::array>;

Pool pool_of(const mx::array* arrays, bool packed) {
  return packed ? Pool(std::tuple(arrays[0], arrays[1], arrays[2])) : Pool(arrays[0]);
}

// Buffers of a pool against the rows that are to go there; `like` is the first buffer of keys.
void check_pool(const char* name, const Arrays& buffers, const mx::array& like, const char* rows_name,
                const mx::array& rows, const Packing& packing) {
  const bool packed = packing.bits != 0;
  const int width = rows.shape(3);
  if (packed && width % packing.group_size != 0) {
    checks::fail(op, rows_name, " has shape ", rows.shape(), ": expected a width that is a multiple of the group size ",
                 packing.group_size);
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    const mx::array& buffer = buffers[i];
    if (buffer.ndim() != 4) {
      checks::fail(op, name, " has an array of shape ", buffer.shape(), ": expected four dimensions");
    }
    const mx::Dtype dtype = packed && i == 0 ? mx::uint32 : rows.dtype();
    if (buffer.dtype() != dtype) {
      checks::fail<DtypeError>(op, name, " has an array of dtype ", buffer.dtype(), ", ", rows_name, " has dtype ",
                               rows.dtype(), ": expected ", dtype);
    }
    const int columns = !packed ? width : i == 0 ? width / 32 * packing.bits : width / packing.group_size;
    const mx::Shape expected = {like.shape(0), rows.shape(1), like.shape(2), columns};
    if (buffer.shape() != expected) {
      checks::fail(op, name, " has an array of shape ", buffer.shape(), ", ", rows_name, " has shape ", rows.shape(),
                   ": expected ", expected);
    }
  }
}

void check(const mx::array& keys, const mx::array& values, const mx::array& pool, const mx::array& table,
           const mx::array& positions) {
  check_token_rows(op, keys, values);
  if (pool.ndim() != 4) {
    checks::fail(op, "key_blocks has an array of shape ", pool.shape(), ": expected four dimensions");
  }
  check_block_keys(op, pool.shape(2));
  check_block_table(op, table, keys.shape(0));
  check_numbers(op, "positions", positions, keys.shape(0));
}

Result paged_append(const mx::array& keys, const mx::array& values, const Pool& key_blocks, const Pool& value_blocks,
                    const mx::array& block_table, const mx::array& positions, int group_size, int bits,
                    mx::StreamOrDevice where) {
  const mx::Stream s = checks::checked_stream(op, where);
  check_both_packed(op, key_blocks, value_blocks);
  const bool packed = is_packed(key_blocks);
  if (packed) {
    quantized_format(op, group_size, bits, true);
  }
  const Packing packing = packed ? Packing{group_size, bits} : Packing{};
  const Arrays key_buffers = arrays_of(key_blocks), value_buffers = arrays_of(value_blocks);
  check(keys, values, key_buffers[0], block_table, positions);
  checks::kernel_dtype(op, {{"keys", keys}});
  if (values.dtype() != keys.dtype()) {
    checks::fail<DtypeError>(op, "values has dtype ", values.dtype(), ", keys ", keys.dtype(), ": expected the same");
  }
  check_pool("key_blocks", key_buffers, key_buffers[0], "keys", keys, packing);
  check_pool("value_blocks", value_buffers, key_buffers[0], "values", values, packing);
  const size_t each = key_buffers.size();
  Arrays inputs = {positions};
  inputs.insert(inputs.end(), key_buffers.begin(), key_buffers.end());
  inputs.insert(inputs.end(), value_buffers.begin(), value_buffers.end());
  inputs.insert(inputs.end(), {block_table, keys, values});
  Arrays outputs;
  const mx::array& pool = key_buffers[0];
  const bool has_rows = keys.shape(0) > 0 && keys.shape(1) > 0 && keys.shape(tokens_axis) > 0 && pool.shape(0) > 0 &&
                        block_table.shape(1) > 0;
  const bool has_columns = keys.shape(3) > 0 && values.shape(3) > 0;
  if (!has_rows) {
    outputs.assign(inputs.begin(), inputs.begin() + 1 + static_cast<std::ptrdiff_t>(2 * each));
    outputs[0] = mx::add(positions, mx::array(keys.shape(tokens_axis)), s);
  } else if (!has_columns || is_switched_off(op)) {
    outputs = PagedAppend::compose(inputs, packing, s);
  } else {
    auto primitive = std::make_shared<PagedAppend>(s, packing);
    check_base<PagedAppend>();
    Append append{std::move(primitive), std::move(inputs), positions.shape(), 2 * each};
    CacheStep step = apply_rope_append(std::move(append));
    outputs = {std::move(step.result)};
    outputs.insert(outputs.end(), step.buffers.begin(), step.buffers.end());
  }
  return {pool_of(&outputs[1], packed), pool_of(&outputs[1 + each], packed), outputs[0]};
}

void bind(nb::module_& module) {
  bind_function(module, op, &paged_append, "keys"_a, "values"_a, "key_blocks"_a, "value_blocks"_a, "block_table"_a,
                "positions"_a, nb::kw_only(), "group_size"_a = 64, "bits"_a = 8, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
