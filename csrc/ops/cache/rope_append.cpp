#include "mlx_internals/known.h"
#include "ops/cache/rope_append.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>

#include "cpu/copy.h"
#include "cpu/rope_append.h"
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "ops/norm/norms.h"
#include "ops/norm/weight_offset.h"
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

constexpr const char* op = "rope_append";
const Name file = "cache/rope_append.metal";

// What of a call is no array.
struct Rope {
  int dims;
  float base;  // 0 where there are frequencies
  float scale;
  float eps;
  int offset;
  int start;
  bool has_freqs;
  bool has_norms;
  bool has_offsets;
  bool is_apart;  // the new heads are three arrays

  bool operator==(const Rope&) const = default;
};

Rope rope_of(const Rotary& rotary, const Offset& offset, int start, bool is_apart = false) {
  const int* of_all = std::get_if<int>(&offset);
  return {.dims = rotary.dims,
          .base = rotary.base.value_or(0.0f),
          .scale = rotary.scale,
          .eps = rotary.eps,
          .offset = of_all ? *of_all : 0,
          .start = start,
          .has_freqs = rotary.freqs.has_value(),
          .has_norms = rotary.query_norm.has_value(),
          .has_offsets = !of_all,
          .is_apart = is_apart};
}

// [batch, heads, tokens, width] of heads that may be [batch, tokens, heads * width] as well.
std::optional<mx::Shape> shape_of_heads(const mx::array& heads, int width) {
  if (heads.ndim() == 4) {
    return heads.shape();
  }
  if (heads.ndim() != 3 || width == 0 || heads.shape(2) % width != 0) {
    return std::nullopt;
  }
  return mx::Shape{heads.shape(0), heads.shape(2) / width, heads.shape(1), width};
}

Arrays inputs_of(const mx::array& heads, const mx::array& keys, const mx::array& values, const Rotary& rotary,
                 const Offset& offset, mx::Stream stream) {
  Arrays inputs;
  inputs.reserve(9);
  inputs.push_back(heads);
  inputs.push_back(keys);
  inputs.push_back(values);
  if (rotary.freqs) {
    inputs.push_back(in_dtype(*rotary.freqs, mx::float32, stream));
  }
  if (rotary.query_norm) {
    inputs.push_back(*rotary.query_norm);
    inputs.push_back(*rotary.key_norm);
  }
  if (const auto* offsets = std::get_if<mx::array>(&offset)) {
    inputs.push_back(in_dtype(*offsets, mx::int32, stream));
  }
  return inputs;
}

CacheStep compose_rope_append(const Arrays& inputs, const Rope& rope, mx::Stream s) {
  const mx::array& heads = inputs[0];
  const int key_heads = inputs[1].shape(1);
  const int query_heads = heads.shape(1) - 2 * key_heads;
  Arrays parts = rope.is_apart ? Arrays{heads, inputs.end()[-2], inputs.end()[-1]}
                               : mx::split(heads, mx::Shape{query_heads, query_heads + key_heads}, 1, s);
  for (mx::array& part : parts) {
    if (part.ndim() == 3) {
      part = mx::transpose(mx::unflatten(part, 2, {-1, inputs[1].shape(3)}, s), {0, 2, 1, 3}, s);
    }
  }
  const auto freqs = rope.has_freqs ? std::optional(inputs[3]) : std::nullopt;
  const auto base = rope.has_freqs ? std::nullopt : std::optional(rope.base);
  for (int i : {0, 1}) {
    if (parts[i].size() == 0) {
      continue;  // mx's reductions of such may not end
    }
    if (rope.has_norms) {
      parts[i] = compose_rms_norm(parts[i], inputs[3 + rope.has_freqs + i], rope.eps, no_offset, s);
    }
    parts[i] = rope.has_offsets ? mx::fast::rope(parts[i], rope.dims, false, base, rope.scale,
                                                 inputs[3 + rope.has_freqs + 2 * rope.has_norms], freqs, s)
                                : mx::fast::rope(parts[i], rope.dims, false, base, rope.scale, rope.offset, freqs, s);
  }
  const auto appended = [&](const mx::array& buffer, const mx::array& fresh) {
    const int after = rope.start + fresh.shape(tokens_axis);
    if (buffer.is_tracer() || fresh.is_tracer()) {  // mx's vmap of slice_update is wrong where the update is shared
      mx::Shape begin(4, 0);
      mx::Shape end = buffer.shape();
      end[tokens_axis] = rope.start;
      const mx::array first = mx::slice(buffer, begin, end, s);
      begin[tokens_axis] = after;
      const mx::array last = mx::slice(buffer, begin, buffer.shape(), s);
      return mx::concatenate({first, mx::astype(fresh, buffer.dtype(), s), last}, tokens_axis, s);
    }
    mx::Shape begin(4, 0);
    mx::Shape end = buffer.shape();
    begin[tokens_axis] = rope.start;
    end[tokens_axis] = after;
    return mx::slice_update(buffer, fresh, begin, end, s);
  };
  return {parts[0], appended(inputs[1], parts[1]), appended(inputs[2], parts[2])};
}

// heads, buffers of keys and of values, frequencies, norms of queries and of keys and offsets, if there are any, and
// where heads are those of queries alone, new keys and values -> queries and the buffers, in place where nobody else
// needs them.
// Heads are [batch, heads, tokens, width], or [batch, tokens, heads * width] where they are apart.
class RopeAppend : public KernelPrimitive {
 public:
  RopeAppend(mx::Stream stream, const Rope& rope) : KernelPrimitive(stream), rope_(rope) {}

  const char* name() const override {
    return "MittensRopeAppend";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return rope_ == static_cast<const RopeAppend&>(other).rope_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const Shape shape = shape_of(inputs);
    const auto size = [](uint32_t n) { return static_cast<int>(n); };
    return {{size(shape.batch), size(shape.query_heads), size(shape.tokens), size(shape.width)},
            inputs[1].shape(),
            inputs[2].shape()};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    const auto is_ready = [&](size_t i) {
      return is_buffer(i) || (is_heads(inputs, i) ? has_rows(inputs[i], 1) : is_row_contiguous(inputs[i]));
    };
    size_t ready = 0;
    while (ready < inputs.size() && is_ready(ready)) {
      ++ready;
    }
    if (ready == inputs.size()) {
      return inputs;
    }
    copies.reserve(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      copies.push_back(is_ready(i) ? inputs[i] : contiguous(inputs[i], stream()));
    }
    return copies;
  }

  void allocate(const Arrays& inputs, Arrays& outputs) override {
    allocate_output(outputs[0], stream());
    const size_t holders = 1 + outputs[0].siblings().size();
    take_or_allocate(outputs[1], inputs[1], stream(), holders);
    take_or_allocate(outputs[2], inputs[2], stream(), holders);
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& heads = inputs[0];
    const Shape shape = shape_of(inputs);
    const Part parts[] = {part_of(inputs, shape, 0), part_of(inputs, shape, 1), part_of(inputs, shape, 2)};
    const RopeAppendParams params{
        .query_strides = {parts[0].strides[0], parts[0].strides[1], parts[0].strides[2]},
        .key_strides = {parts[1].strides[0], parts[1].strides[1], parts[1].strides[2]},
        .value_strides = {parts[2].strides[0], parts[2].strides[1], parts[2].strides[2]},
        .query_heads = shape.query_heads,
        .key_heads = shape.key_heads,
        .tokens = shape.tokens,
        .width = shape.width,
        .pairs = static_cast<uint32_t>(rope_.dims / 2),
        .key_capacity = static_cast<uint32_t>(inputs[1].shape(tokens_axis)),
        .value_capacity = static_cast<uint32_t>(inputs[2].shape(tokens_axis)),
        .first = static_cast<uint32_t>(rope_.start),
        .offset = rope_.offset,
        .scale = rope_.scale,
        .log2_base = rope_.has_freqs ? 0.0f : std::log2(rope_.base),
        .eps = rope_.eps,
        .has_freqs = rope_.has_freqs,
        .has_offsets = rope_.has_offsets,
    };
    constexpr uint32_t simdgroups = 4;  // of a threadgroup, each with 64 columns of a head
    const uint32_t columns = (shape.query_heads + 2 * shape.key_heads) * ceil_divide(shape.width, 64u);
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(heads.dtype(), "rope", rope_.has_norms ? "append_normed" : "append");
    launch.threadgroups = {shape.batch * shape.tokens, ceil_divide(columns, simdgroups), 1};
    launch.threads = {32 * simdgroups, 1, 1};
    for (const Part& part : parts) {
      part.add_to(launch);
    }
    const auto optional = [&](const mx::array* array) { array ? launch.input(*array) : launch.stand_in(heads); };
    optional(freqs(inputs));
    optional(norm(inputs, 0));
    optional(norm(inputs, 1));
    optional(offsets(inputs));
    launch.output(outputs[0]).update(outputs[1]).update(outputs[2]).params(params);

    std::vector<Launch> all;
    all.reserve(3);
    for (int i : {1, 2}) {
      if (needs_copy(inputs[i], outputs[i])) {
        all.push_back(copy_launch(inputs[i], outputs[i]));
      }
    }
    if (shape.tokens > 0) {
      all.push_back(std::move(launch));
    }
    return all;
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& heads = inputs[0];
    const Shape shape = shape_of(inputs);
    const auto data = [](const mx::array* array) { return array ? data_of(*array) : nullptr; };
    const cpu::RopeAppend call{
        .type = native_type(heads.dtype()),
        .new_queries = part_of(inputs, shape, 0).native(),
        .new_keys = part_of(inputs, shape, 1).native(),
        .new_values = part_of(inputs, shape, 2).native(),
        .freqs = static_cast<const float*>(data(freqs(inputs))),
        .query_norm = data(norm(inputs, 0)),
        .key_norm = data(norm(inputs, 1)),
        .offsets = static_cast<const int32_t*>(data(offsets(inputs))),
        .queries = data_of(outputs[0]),
        .keys = data_of(outputs[1]),
        .values = data_of(outputs[2]),
        .batch = shape.batch,
        .query_heads = shape.query_heads,
        .key_heads = shape.key_heads,
        .tokens = shape.tokens,
        .width = shape.width,
        .pairs = static_cast<size_t>(rope_.dims / 2),
        .key_capacity = static_cast<size_t>(inputs[1].shape(tokens_axis)),
        .value_capacity = static_cast<size_t>(inputs[2].shape(tokens_axis)),
        .first = static_cast<size_t>(rope_.start),
        .offset = rope_.offset,
        .scale = rope_.scale,
        .base = rope_.base,
        .eps = rope_.eps,
    };
    std::vector<std::function<void()>> copies;
    for (int i : {1, 2}) {
      if (needs_copy(inputs[i], outputs[i])) {
        copies.push_back([from = data_of(inputs[i]), to = data_of(outputs[i]), item = inputs[i].itemsize(),
                          shape = inputs[i].shape(), strides = inputs[i].strides()] {
          cpu::copy_strided(from, to, item, shape.data(), strides.data(), shape.size());
        });
      }
    }
    return [call, copies = std::move(copies)] {
      for (const auto& copy : copies) {
        copy();
      }
      cpu::rope_append(call);
    };
  }

  Arrays composed(const Arrays& inputs) override {
    CacheStep step = compose_rope_append(inputs, rope_, stream());
    return {step.result, step.keys, step.values};
  }

 private:
  struct Shape {
    uint32_t batch;
    uint32_t query_heads;
    uint32_t key_heads;
    uint32_t tokens;
    uint32_t width;
  };

  Shape shape_of(const Arrays& inputs) const {
    const mx::Shape heads = shape_of_heads(inputs[0], inputs[1].shape(3)).value();
    const auto size = [&](int axis) { return static_cast<uint32_t>(heads[axis]); };
    const uint32_t key_heads = inputs[1].shape(1);
    const uint32_t others = rope_.is_apart ? 0 : 2 * key_heads;
    return {size(0), size(1) - others, key_heads, size(2), size(3)};
  }

  // The new heads of queries (0), keys (1) or values (2).
  struct Part {
    const mx::array& array;
    int64_t strides[3];  // of batch, heads and tokens
    int64_t first;  // in bytes
    int64_t reach;  // in bytes as well

    void add_to(Launch& launch) const {
      launch.input(array, first, reach);
    }
    cpu::Heads native() const {
      return {static_cast<const std::byte*>(data_of(array)) + first, {strides[0], strides[1], strides[2]}};
    }
  };

  Part part_of(const Arrays& inputs, const Shape& shape, int which) const {
    const mx::array& array = which == 0 || !rope_.is_apart ? inputs[0] : inputs.end()[which - 3];
    const int64_t count = which == 0 ? shape.query_heads : shape.key_heads;
    const int64_t before = which == 0 || rope_.is_apart ? 0 : shape.query_heads + (which - 1) * shape.key_heads;
    const int64_t width = shape.width;
    const bool is_flat = array.ndim() == 3;
    const int64_t batch = array.strides(0);
    const int64_t head = is_flat ? width : array.strides(1);
    const int64_t token = array.strides(is_flat ? 1 : 2);
    const int64_t elements =
        width + (count - 1) * head + (int64_t(shape.batch) - 1) * batch + (int64_t(shape.tokens) - 1) * token;
    const int64_t item = array.itemsize();
    return {array, {batch, head, token}, before * head * item, elements * item};
  }

  bool is_heads(const Arrays& inputs, size_t i) const {
    return i == 0 || (rope_.is_apart && i + 2 >= inputs.size());
  }

  static bool is_buffer(size_t i) {
    return i == 1 || i == 2;
  }

  // Whether an output has memory of its own instead of the input's.
  static bool needs_copy(const mx::array& input, const mx::array& output) {
    return input.size() > 0 && !same_memory(input, output);
  }

  const mx::array* freqs(const Arrays& inputs) const {
    return rope_.has_freqs ? &inputs[3] : nullptr;
  }

  // Of queries (0) or keys (1).
  const mx::array* norm(const Arrays& inputs, int which) const {
    return rope_.has_norms ? &inputs[3 + rope_.has_freqs + which] : nullptr;
  }

  const mx::array* offsets(const Arrays& inputs) const {
    return rope_.has_offsets ? &inputs[3 + rope_.has_freqs + 2 * rope_.has_norms] : nullptr;
  }

  Rope rope_;
};

void check_buffer(const char* name, const mx::array& buffer, const mx::array& heads, int start) {
  if (buffer.ndim() != 4) {
    checks::fail(op, name, " has shape ", buffer.shape(), ": expected four dimensions");
  }
  if (buffer.shape(0) != heads.shape(0) || buffer.shape(3) != heads.shape(3)) {
    checks::fail(op, name, " has shape ", buffer.shape(), ", heads has shape ", heads.shape(),
                 ": expected the same batch and width");
  }
  const int tokens = heads.shape(tokens_axis);
  if (start < 0 || tokens > buffer.shape(tokens_axis) - start) {
    checks::fail(op, name, " has room for ", buffer.shape(tokens_axis), " tokens: expected ", tokens, " of them from ",
                 start, " on to fit");
  }
}

// Of heads [.., width].
void check_rotary(const Rotary& rotary, const mx::array& heads) {
  if (rotary.dims <= 0 || rotary.dims % 2 != 0 || rotary.dims > heads.shape(-1)) {
    checks::fail(op, "dims is ", rotary.dims, ": expected a positive even number, at most the width of ",
                 heads.shape(-1));
  }
  if (rotary.base.has_value() == rotary.freqs.has_value()) {
    checks::fail(op, rotary.base ? "both base and freqs are given" : "neither base nor freqs is given",
                 ": expected one of them");
  }
  if (rotary.base && !(std::isfinite(*rotary.base) && *rotary.base > 0)) {
    checks::fail(op, "base is ", *rotary.base, ": expected a finite positive number");
  }
  if (!std::isfinite(rotary.scale)) {
    checks::fail(op, "scale is ", rotary.scale, ": expected a finite number");
  }
  if (rotary.freqs && mx::issubdtype(rotary.freqs->dtype(), mx::complexfloating)) {
    checks::fail<DtypeError>(op, "freqs has dtype ", rotary.freqs->dtype(), ": expected float32");
  }
  if (rotary.freqs && (rotary.freqs->ndim() != 1 || rotary.freqs->shape(0) != rotary.dims / 2)) {
    checks::fail(op, "freqs has shape ", rotary.freqs->shape(), ": expected one dimension with ", rotary.dims / 2,
                 " elements");
  }
  if (rotary.query_norm.has_value() != rotary.key_norm.has_value()) {
    const char* names[] = {"query_norm", "key_norm"};
    const bool first = rotary.query_norm.has_value();
    checks::fail(op, names[!first], " is given without ", names[first], ": expected both or none");
  }
  if (rotary.query_norm) {
    checks::per_column(op, "query_norm", *rotary.query_norm, heads);
    checks::per_column(op, "key_norm", *rotary.key_norm, heads);
    checks::epsilon(op, rotary.eps);
  }
}

// Of arrays [batch, ..].
void check_offset(const Offset& offset, const mx::array& batched) {
  const auto* offsets = std::get_if<mx::array>(&offset);
  if (!offsets) {
    return;
  }
  if (!mx::issubdtype(offsets->dtype(), mx::integer)) {
    checks::fail<DtypeError>(op, "offset has dtype ", offsets->dtype(), ": expected an integer");
  }
  if (offsets->shape() != mx::Shape{batched.shape(0)}) {
    checks::fail(op, "offset has shape ", offsets->shape(), ": expected a number, or (", batched.shape(0),
                 "), one for each row of the batch");
  }
}

void check(const mx::array& heads, const mx::array& keys, const mx::array& values, const Rotary& rotary, int start) {
  if (heads.ndim() != 4) {
    checks::fail(op, "heads has shape ", heads.shape(), ": expected four dimensions");
  }
  check_buffer("keys", keys, heads, start);
  check_buffer("values", values, heads, start);
  if (keys.shape(1) != values.shape(1)) {
    checks::fail(op, "keys has ", keys.shape(1), " heads, values has ", values.shape(1), ": expected as many");
  }
  if (heads.shape(1) <= 2 * keys.shape(1)) {
    checks::fail(op, "heads has ", heads.shape(1), " heads: expected more than ", 2 * keys.shape(1),
                 ", the keys' and the values'");
  }
  check_rotary(rotary, heads);
}

using Result = std::tuple<mx::array, mx::array, mx::array>;

Result rope_append(const mx::array& heads, const mx::array& keys, const mx::array& values, const Rotary& rotary,
                   const Offset& offset, std::optional<int> start, mx::StreamOrDevice where) {
  if (!start && std::holds_alternative<mx::array>(offset)) {
    checks::fail(op, "offset is an array and start is not given: expected where in the buffers the first token goes");
  }
  const int first = start ? *start : std::get<int>(offset);
  const mx::Stream stream = checks::checked_stream(op, where);
  auto append = rope_append_of(heads, keys, values, rotary, offset, first, stream);
  CacheStep step = append ? apply_rope_append(*std::move(append))
                          : compose_rope_append(inputs_of(heads, keys, values, rotary, offset, stream),
                                                rope_of(rotary, offset, first), stream);
  return {std::move(step.result), std::move(step.keys), std::move(step.values)};
}

Rotary make_rotary(int dims, std::optional<float> base, float scale, std::optional<mx::array> freqs,
                   std::optional<mx::array> query_norm, std::optional<mx::array> key_norm, float eps) {
  return {dims, base, scale, std::move(freqs), std::move(query_norm), std::move(key_norm), eps};
}

void bind(nb::module_& module) {
  nb::class_<Rotary>(module, "Rotary", "How a layer turns its heads: what stays the same from call to call.")
      .def(nb::new_(&make_rotary), "dims"_a, "base"_a = nb::none(), "scale"_a = 1.0f, "freqs"_a = nb::none(),
           "query_norm"_a = nb::none(), "key_norm"_a = nb::none(), "eps"_a = 0.0f)
      .def("__deepcopy__", [](const Rotary& rotary, nb::handle) { return rotary; }, "memo"_a);
  bind_function(module, op, &rope_append, "heads"_a, "keys"_a, "values"_a, "rotary"_a, "offset"_a,
                "start"_a = nb::none(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

std::optional<Append> rope_append_of(const mx::array& heads, const mx::array& keys, const mx::array& values,
                                     const Rotary& rotary, const Offset& offset, int start, mx::Stream stream) {
  check(heads, keys, values, rotary, start);
  check_offset(offset, heads);
  const mx::Dtype dtype = checks::floating(op, {{"heads", heads}});
  const char* reason = has_kernels(dtype) ? nullptr : "float64";
  for (const auto& [name, array] : {std::pair("keys", &keys), std::pair("values", &values)}) {
    if (array->dtype() != dtype) {
      checks::floating(op, {{name, *array}});
      reason = reason ? reason : "buffers of another type than the heads'";
    }
  }
  if (rotary.query_norm && (rotary.query_norm->dtype() != dtype || rotary.key_norm->dtype() != dtype)) {
    checks::floating(op, {{"heads", heads}, {"query_norm", rotary.query_norm}, {"key_norm", rotary.key_norm}});
    reason = reason ? reason : "norms of another type than the heads'";
  }
  if (reason) {
    return fallback(op, reason);
  }
  mx::Shape queries = heads.shape();
  queries[1] -= 2 * keys.shape(1);
  return Append{std::make_shared<RopeAppend>(stream, rope_of(rotary, offset, start)),
                inputs_of(heads, keys, values, rotary, offset, stream), std::move(queries)};
}

std::optional<Append> rope_append_of(const mx::array& new_queries, const mx::array& new_keys,
                                     const mx::array& new_values, const mx::array& keys, const mx::array& values,
                                     const Rotary& rotary, const Offset& offset, int start, mx::Stream stream) {
  if (keys.ndim() != 4 || values.ndim() != 4 || !has_kernels(keys.dtype()) || values.dtype() != keys.dtype() ||
      start < 0) {
    return std::nullopt;
  }
  const auto queries = shape_of_heads(new_queries, keys.shape(3));
  const auto fresh_keys = shape_of_heads(new_keys, keys.shape(3));
  const auto fresh_values = shape_of_heads(new_values, keys.shape(3));
  if (!queries || !fresh_keys || fresh_keys != fresh_values) {
    return std::nullopt;
  }
  for (int axis : {0, 2, 3}) {
    if ((*fresh_keys)[axis] != (*queries)[axis]) {
      return std::nullopt;
    }
  }
  for (const auto* fresh : {&new_queries, &new_keys, &new_values}) {
    if (fresh->dtype() != keys.dtype()) {
      return std::nullopt;
    }
  }
  for (const auto* buffer : {&keys, &values}) {
    if (buffer->shape(0) != (*queries)[0] || buffer->shape(1) != (*fresh_keys)[1] ||
        buffer->shape(3) != (*queries)[3] || (*queries)[2] > buffer->shape(tokens_axis) - start) {
      return std::nullopt;
    }
  }
  try {
    check_rotary(rotary, keys);
    check_offset(offset, keys);
  } catch (const std::invalid_argument&) {  // which the caller's own op says
    return std::nullopt;
  }
  Append append{std::make_shared<RopeAppend>(stream, rope_of(rotary, offset, start, true)),
                inputs_of(new_queries, keys, values, rotary, offset, stream), *queries};
  append.inputs.push_back(new_keys);
  append.inputs.push_back(new_values);
  return append;
}

bool may_be_a_step(const Append& append) {
  return mlx_internals::is_known() &&
         std::none_of(append.inputs.begin(), append.inputs.end(), [](const mx::array& a) { return a.is_tracer(); });
}

CacheStep apply_rope_append(Append append) {
  if (may_be_a_step(append)) {
    return cache_step(std::move(append), std::nullopt);
  }
  const mx::Dtype dtype = append.inputs[0].dtype();
  std::vector<mx::Shape> shapes = append.primitive->output_shapes(append.inputs);
  Arrays outputs = mx::array::make_arrays(std::move(shapes), {dtype, dtype, dtype}, append.primitive, append.inputs);
  return {std::move(outputs[0]), std::move(outputs[1]), std::move(outputs[2])};
}

}  // namespace mittens
