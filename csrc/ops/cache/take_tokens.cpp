#include <limits>
#include <memory>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include "cpu/cache/take_tokens.h"
#include "mlx/ops.h"
#include "ops/cache/token_rows.h"
#include "params/chosen_keys.h"
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

constexpr const char* op = "take_tokens";
const Name file = "cache/take_tokens.metal";

// The op in mx operations.
Arrays compose(const Arrays& inputs, mx::Stream s) {
  const int tokens = inputs[0].shape(2);
  mx::array indices = mx::stop_gradient(inputs[2], s);
  mx::array is_there = mx::less(indices, mx::array(tokens, indices.dtype()), s);
  if (indices.dtype() == mx::int32) {
    const mx::array zero(0, mx::int32);
    indices = mx::where(mx::less(indices, zero, s), mx::add(indices, mx::array(tokens), s), indices, s);
    is_there = mx::logical_and(is_there, mx::greater_equal(indices, zero, s), s);
  }
  const mx::array within = mx::expand_dims(mx::where(is_there, indices, mx::zeros_like(indices, s), s), 3, s);
  const mx::array is_row = mx::expand_dims(is_there, 3, s);
  Arrays results;
  for (size_t i = 0; i < 2; ++i) {
    const mx::array& rows = inputs[i];
    const mx::Shape shape = {rows.shape(0), rows.shape(1), indices.shape(2), rows.shape(3)};
    const mx::array nan(std::numeric_limits<float>::quiet_NaN(), rows.dtype());
    if (tokens == 0) {
      results.push_back(mx::full(shape, nan, s));  // of shape 0
      continue;
    }
    const mx::array taken = mx::take_along_axis(rows, mx::broadcast_to(within, shape, s), 2, s);
    results.push_back(mx::where(is_row, taken, nan, s));
  }
  return results;
}

void check(const mx::array& keys, const mx::array& values, const mx::array& indices) {
  check_token_rows(op, keys, values);
  if (indices.ndim() != 3 || indices.shape(0) != keys.shape(0) ||
      (indices.shape(1) != 1 && indices.shape(1) != keys.shape(1))) {
    checks::fail(op, "indices has shape ", indices.shape(), ", keys ", keys.shape(),
                 ": expected [batch, heads, count], or one head");
  }
  if (keys.shape(2) == 0 && indices.shape(2) != 0) {
    checks::fail(op, "keys has shape ", keys.shape(), ", indices ", indices.shape(), ": expected a token to take");
  }
}

// keys and values [batch, heads, tokens, ..], indices [batch, heads or 1, count] -> rows of both.
class TakeTokens : public KernelPrimitive {
 public:
  using KernelPrimitive::KernelPrimitive;

  const char* name() const override {
    return "MittensTakeTokens";
  }

  bool is_equivalent(const mx::Primitive&) const override {
    return true;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    check(inputs[0], inputs[1], inputs[2]);
    std::vector<mx::Shape> shapes = {inputs[0].shape(), inputs[1].shape()};
    for (mx::Shape& shape : shapes) {
      shape[2] = inputs[2].shape(2);
    }
    return shapes;
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    for (const mx::array& input : inputs) {
      copies.push_back(with_rows(input, 1, stream()));
    }
    return copies;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array &keys = inputs[0], &values = inputs[1], &indices = inputs[2];
    const auto has_packs = [](const mx::array& rows) {
      return has_rows(rows, 16) && rows.shape(3) * rows.itemsize() % 16 == 0;
    };
    TakeTokensParams params{
        .key_strides = {keys.strides(0), keys.strides(1), keys.strides(2)},
        .value_strides = {values.strides(0), values.strides(1), values.strides(2)},
        .index_strides = {indices.strides(0), indices.shape(1) == 1 ? 0 : indices.strides(1)},
        .tokens = static_cast<uint32_t>(keys.shape(2)),
        .width = static_cast<uint32_t>(keys.shape(3)),
        .value_width = static_cast<uint32_t>(values.shape(3)),
        .count = static_cast<uint32_t>(indices.shape(2)),
        .is_signed = indices.dtype() == mx::int32,
        .has_packs = has_packs(keys) && has_packs(values),
    };
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(keys.dtype(), op);
    launch.threadgroups = {ceil_divide(params.count, kChosenKeysSimdgroups), static_cast<uint32_t>(keys.shape(1)),
                           static_cast<uint32_t>(keys.shape(0))};
    launch.threads = {32 * kChosenKeysSimdgroups, 1, 1};
    add_view(launch, keys);
    add_view(launch, values);
    add_view(launch, indices);
    return in_order(launch.output(outputs[0]).output(outputs[1]).params(params));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& indices = inputs[2];
    const auto part = [&](size_t i) {
      const mx::array& rows = inputs[i];
      return cpu::TokenRows{data_of(rows),
                            {rows.strides(0), rows.strides(1), rows.strides(2)},
                            static_cast<size_t>(rows.shape(3)),
                            data_of(outputs[i])};
    };
    const mx::Dtype dtype = inputs[0].dtype();
    const cpu::TakeTokens call{
        .parts = {part(0), part(1)},
        .indices = indices.data<uint32_t>(),
        .index_strides = {indices.strides(0), indices.shape(1) == 1 ? 0 : indices.strides(1)},
        .is_signed = indices.dtype() == mx::int32,
        .batch = static_cast<size_t>(inputs[0].shape(0)),
        .heads = static_cast<size_t>(inputs[0].shape(1)),
        .tokens = static_cast<size_t>(inputs[0].shape(2)),
        .count = static_cast<size_t>(indices.shape(2)),
        .item_bytes = dtype.size(),
        .nan = dtype == mx::float32   ? 0x7fc00000u
               : dtype == mx::float16 ? 0x7e00u
                                      : 0x7fc0u,
    };
    return [call] { cpu::take_tokens(call); };
  }

  Arrays composed(const Arrays& inputs) override {
    return compose(inputs, stream());
  }
};

std::pair<mx::array, mx::array> take_tokens(const mx::array& keys, const mx::array& values, const mx::array& indices,
                                            mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  check(keys, values, indices);
  if (indices.dtype() != mx::int32 && indices.dtype() != mx::uint32) {
    checks::fail<DtypeError>(op, "indices has dtype ", indices.dtype(), ": expected int32 or uint32");
  }
  checks::floating(op, {{"keys", keys}});
  checks::floating(op, {{"values", values}});
  Arrays inputs = {keys, values, indices};
  const bool is_empty = keys.size() == 0 || values.size() == 0 || indices.size() == 0;
  const bool is_one_type = keys.dtype() == values.dtype();
  const bool is_covered = is_one_type && has_kernels(keys.dtype());
  if (!is_empty && !is_covered) {
    fallback(op, is_one_type ? "float64" : "keys and values of two dtypes");
  }
  if (is_empty || !is_covered || is_switched_off(op)) {
    const Arrays results = compose(inputs, stream);
    return {results[0], results[1]};
  }
  auto primitive = std::make_shared<TakeTokens>(stream);
  check_base<TakeTokens>();
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  const auto results =
      mx::array::make_arrays(std::move(shapes), {keys.dtype(), keys.dtype()}, primitive, std::move(inputs));
  return {results[0], results[1]};
}

void bind(nb::module_& module) {
  bind_function(module, op, &take_tokens, "keys"_a, "values"_a, "indices"_a, nb::kw_only(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
