#include "ops/cache/rope_append_primitive.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cpu/rope_append.h"
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "mlx_internals/known.h"
#include "ops/cache/buffer_copies.h"
#include "ops/norm/norms.h"
#include "ops/norm/weight_offset.h"
#include "params/cache.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/calibration.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/ready_inputs.h"

namespace mittens {

Rope rope_of(const Rotary& rotary, const Offset& offset, int start, const Packing& packing, bool is_apart) {
  const int* of_all = std::get_if<int>(&offset);
  return {.begin = rotary.begin,
          .dims = rotary.dims,
          .base = rotary.base.value_or(0.0f),
          .scale = rotary.scale,
          .eps = rotary.eps,
          .weight_offset = rotary.weight_offset == 0 ? no_offset : rotary.weight_offset,
          .query_scale = rotary.query_scale,
          .value_scale = rotary.value_scale,
          .offset = of_all ? *of_all : 0,
          .start = start,
          .has_freqs = rotary.freqs.has_value(),
          .has_norms = rotary.query_norm.has_value(),
          .has_value_norm = rotary.value_norm.has_value(),
          .has_offsets = !of_all,
          .traditional = rotary.traditional,
          .is_apart = is_apart,
          .packing = packing};
}

std::optional<mx::Shape> shape_of_heads(const mx::array& heads, int width) {
  if (heads.ndim() == 4) {
    return heads.shape();
  }
  if (heads.ndim() != 3 || width == 0 || heads.shape(2) % width != 0) {
    return std::nullopt;
  }
  return mx::Shape{heads.shape(0), heads.shape(2) / width, heads.shape(1), width};
}

namespace {

// Offsets [batch] of an array of one that is for all rows, as mx.fast.rope takes it too.
mx::array one_for_each_row(const mx::array& offsets, int batch, mx::Stream stream) {
  if (offsets.shape() == mx::Shape{batch}) {
    return offsets;
  }
  const mx::array one = mx::reshape(offsets, {1}, stream);
  return batch == 1 ? one : mx::contiguous(mx::broadcast_to(one, {batch}, stream), false, stream);
}

}  // namespace

Arrays inputs_of(const mx::array& heads, const Arrays& buffers, const Rotary& rotary, const Offset& offset,
                 mx::Stream stream) {
  Arrays inputs;
  inputs.reserve(buffers.size() + 8);
  inputs.push_back(heads);
  inputs.insert(inputs.end(), buffers.begin(), buffers.end());
  if (rotary.freqs) {
    inputs.push_back(in_dtype(*rotary.freqs, mx::float32, stream));
  }
  if (rotary.query_norm) {
    inputs.push_back(*rotary.query_norm);
    inputs.push_back(*rotary.key_norm);
  }
  if (rotary.value_norm) {
    inputs.push_back(*rotary.value_norm);
  }
  if (const auto* offsets = std::get_if<mx::array>(&offset)) {
    inputs.push_back(one_for_each_row(in_dtype(*offsets, mx::int32, stream), heads.shape(0), stream));
  }
  return inputs;
}

namespace {

// Of a head.
int width_of(const Arrays& inputs, const Rope& rope) {
  const int columns = inputs[1].shape(3);
  return rope.packing.bits == 0 ? columns : static_cast<int>(int64_t(columns) * 32 / rope.packing.bits);
}

int value_width_of(const Arrays& inputs, const Rope& rope) {
  return rope.packing.bits == 0 ? inputs[2].shape(3) : width_of(inputs, rope);
}

// Gives each head the columns that all share.
mx::array shared_by(const mx::array& heads, const mx::array& shared, mx::Stream stream) {
  mx::Shape shape = heads.shape();
  shape[3] = shared.shape(3);
  return mx::broadcast_to(shared, shape, stream);
}

}  // namespace

CacheStep compose_rope_append(const Arrays& inputs, const Rope& rope, mx::Stream s) {
  const mx::array& heads = inputs[0];
  const int key_heads = inputs[1].shape(1);
  const int query_heads = heads.shape(1) - 2 * key_heads;
  const size_t others = 1 + rope.buffers();
  Arrays parts = rope.is_apart ? Arrays{heads, inputs.end()[-2], inputs.end()[-1]}
                               : mx::split(heads, mx::Shape{query_heads, query_heads + key_heads}, 1, s);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].ndim() == 3) {
      const int width = i == 2 ? value_width_of(inputs, rope) : width_of(inputs, rope);
      parts[i] = mx::transpose(mx::unflatten(parts[i], 2, {-1, width}, s), {0, 2, 1, 3}, s);
    }
  }
  const auto freqs = rope.has_freqs ? std::optional(inputs[others]) : std::nullopt;
  const auto base = rope.has_freqs ? std::nullopt : std::optional(rope.base);
  for (int i : {0, 1}) {
    if (parts[i].size() == 0) {
      continue;  // mx's reductions are not for such
    }
    if (rope.has_norms) {
      parts[i] = compose_rms_norm(parts[i], inputs[others + rope.has_freqs + i], rope.eps, rope.weight_offset, s);
    }
    const auto turned = [&](const mx::array& x) {
      const auto with = [&](const auto& offset) {
        return mx::fast::rope(x, rope.dims, rope.traditional, base, rope.scale, offset, freqs, s);
      };
      return rope.has_offsets ? with(inputs[others + rope.has_freqs + rope.norms()]) : with(rope.offset);
    };
    if (rope.begin == 0) {
      parts[i] = turned(parts[i]);
      continue;
    }
    const Arrays columns = i == 0 ? mx::split(parts[0], mx::Shape{rope.begin}, 3, s)
                                  : Arrays{parts[1], shared_by(parts[1], inputs.end()[-3], s)};
    parts[i] = mx::concatenate({columns[0], turned(columns[1])}, 3, s);
  }
  const auto times = [&](mx::array& part, float scale) {
    if (scale != 1.0f) {
      part = mx::multiply(part, mx::array(scale, part.dtype()), s);
    }
  };
  times(parts[0], rope.query_scale);
  if (rope.has_value_norm && parts[2].size() > 0) {
    const size_t norm = others + rope.has_freqs + 2 * rope.has_norms;
    parts[2] = compose_rms_norm(parts[2], inputs[norm], rope.eps, rope.weight_offset, s);
    times(parts[2], rope.value_scale);
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
  if (rope.packing.bits == 0) {
    return {parts[0], {appended(inputs[1], parts[1]), appended(inputs[2], parts[2])}};
  }
  CacheStep step{parts[0], {}};
  for (int i : {0, 1}) {
    const Arrays buffers(inputs.begin() + 1 + 3 * i, inputs.begin() + 4 + 3 * i);
    const mx::array& fresh = parts[1 + i];
    const Arrays packed =
        fresh.size() == 0 ? Arrays()
                          : mx::quantize(fresh, rope.packing.group_size, rope.packing.bits, "affine", std::nullopt, s);
    for (size_t j = 0; j < buffers.size(); ++j) {
      step.buffers.push_back(packed.empty() ? buffers[j] : appended(buffers[j], packed[j]));
    }
  }
  return step;
}

namespace {

const Name file = "cache/rope_append.metal";
const Name quantized_file = "cache/quantized_rope_append.metal";

// heads, buffers, frequencies, norms of queries and of keys and offsets, if there are any, and where heads are those of
// queries alone, the key that heads share, if there is one, new keys and values -> queries and the buffers, in place
// where nobody else needs them. Heads are [batch, heads, tokens, width], or [batch, tokens, heads * width] where they
// are apart.
class RopeAppend : public KernelPrimitive {
 public:
  RopeAppend(mx::Stream stream, const Rope& rope) : KernelPrimitive(stream), rope_(rope) {}

  const char* name() const override {
    return is_packed() ? "MittensQuantizedRopeAppend" : "MittensRopeAppend";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return rope_ == static_cast<const RopeAppend&>(other).rope_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const Shape shape = shape_of(inputs);
    const auto size = [](uint32_t n) { return static_cast<int>(n); };
    std::vector<mx::Shape> shapes = {
        {size(shape.batch), size(shape.query_heads), size(shape.tokens), size(shape.width)}};
    for (size_t i = 1; i <= rope_.buffers(); ++i) {
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

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    return ready_inputs(inputs, stream(), copies, [&](size_t i) {
      return is_buffer(i) || (is_heads(inputs, i) ? has_rows(inputs[i], 1) : is_row_contiguous(inputs[i]));
    });
  }

  void allocate(const Arrays& inputs, Arrays& outputs) override {
    allocate_output(outputs[0], stream());
    const size_t holders = 1 + outputs[0].siblings().size();
    for (size_t i = 1; i <= rope_.buffers(); ++i) {
      take_or_allocate(outputs[i], inputs[i], stream(), holders);
    }
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& heads = inputs[0];
    const Shape shape = shape_of(inputs);
    const Part parts[] = {part_of(inputs, shape, 0), part_of(inputs, shape, 1), part_of(inputs, shape, 2)};
    const Part shared_key = shared_key_of(inputs, shape);
    const RopeAppendParams params{
        .query_strides = {parts[0].strides[0], parts[0].strides[1], parts[0].strides[2]},
        .key_strides = {parts[1].strides[0], parts[1].strides[1], parts[1].strides[2]},
        .value_strides = {parts[2].strides[0], parts[2].strides[1], parts[2].strides[2]},
        .shared_key_strides = {shared_key.strides[0], shared_key.strides[2]},
        .query_heads = shape.query_heads,
        .key_heads = shape.key_heads,
        .tokens = shape.tokens,
        .width = shape.width,
        .value_width = shape.value_width,
        .begin = static_cast<uint32_t>(rope_.begin),
        .pairs = static_cast<uint32_t>(rope_.dims / 2),
        .key_capacity = static_cast<uint32_t>(keys(inputs).shape(tokens_axis)),
        .value_capacity = static_cast<uint32_t>(values(inputs).shape(tokens_axis)),
        .first = static_cast<uint32_t>(rope_.start),
        .offset = rope_.offset,
        .scale = rope_.scale,
        .log2_base = rope_.has_freqs ? 0.0f : std::log2(rope_.base),
        .eps = rope_.eps,
        .weight_offset = rope_.weight_offset,
        .query_scale = rope_.query_scale,
        .value_scale = rope_.value_scale,
        .has_freqs = rope_.has_freqs,
        .has_offsets = rope_.has_offsets,
        .traditional = rope_.traditional,
        .has_value_norm = rope_.has_value_norm,
    };
    constexpr uint32_t simdgroups = 4;  // of a threadgroup, each with a part of a head
    const uint32_t query_parts = ceil_divide(shape.width, 64u);
    const uint32_t key_parts = is_packed() ? shape.width / rope_.packing.group_size : query_parts;
    const uint32_t value_parts = is_packed() ? key_parts : ceil_divide(shape.value_width, 64u);
    const uint32_t all_parts = shape.query_heads * query_parts + shape.key_heads * (key_parts + value_parts);
    Launch launch;
    launch.arguments.reserve(11 + rope_.buffers());
    launch.file = is_packed() ? quantized_file : file;
    launch.kernel = kernel_name(heads.dtype(), is_packed() ? "quantized_rope" : "rope",
                                rope_.has_norms ? "append_normed" : "append");
    launch.threadgroups = {shape.batch * shape.tokens, ceil_divide(all_parts, simdgroups), 1};
    launch.threads = {32 * simdgroups, 1, 1};
    for (const Part& part : parts) {
      part.add_to(launch);
    }
    if (rope_.begin > 0) {
      shared_key.add_to(launch);
    } else if (!is_packed()) {
      launch.stand_in(heads);
    }
    const auto optional = [&](const mx::array* array) { array ? launch.input(*array) : launch.stand_in(heads); };
    optional(freqs(inputs));
    optional(norm(inputs, 0));
    optional(norm(inputs, 1));
    if (!is_packed()) {
      optional(value_norm(inputs));
    }
    optional(offsets(inputs));
    launch.output(outputs[0]);
    for (size_t i = 1; i <= rope_.buffers(); ++i) {
      launch.update(outputs[i]);
    }
    if (is_packed()) {
      launch.params(QuantizedRopeAppendParams{.rope = params,
                                              .group_size = static_cast<uint32_t>(rope_.packing.group_size),
                                              .bits = static_cast<uint32_t>(rope_.packing.bits)});
    } else {
      launch.params(params);
    }

    std::vector<Launch> all = buffer_copies(inputs, outputs, rope_.buffers());
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
        .shared_key = shared_key_of(inputs, shape).native(),
        .freqs = static_cast<const float*>(data(freqs(inputs))),
        .query_norm = data(norm(inputs, 0)),
        .key_norm = data(norm(inputs, 1)),
        .value_norm = data(value_norm(inputs)),
        .offsets = static_cast<const int32_t*>(data(offsets(inputs))),
        .queries = data_of(outputs[0]),
        .keys = native_buffer(outputs, 0),
        .values = native_buffer(outputs, 1),
        .batch = shape.batch,
        .query_heads = shape.query_heads,
        .key_heads = shape.key_heads,
        .tokens = shape.tokens,
        .width = shape.width,
        .value_width = shape.value_width,
        .begin = static_cast<size_t>(rope_.begin),
        .pairs = static_cast<size_t>(rope_.dims / 2),
        .key_capacity = static_cast<size_t>(keys(inputs).shape(tokens_axis)),
        .value_capacity = static_cast<size_t>(values(inputs).shape(tokens_axis)),
        .first = static_cast<size_t>(rope_.start),
        .offset = rope_.offset,
        .scale = rope_.scale,
        .base = rope_.base,
        .eps = rope_.eps,
        .weight_offset = rope_.weight_offset,
        .query_scale = rope_.query_scale,
        .value_scale = rope_.value_scale,
        .traditional = rope_.traditional,
        .group_size = static_cast<size_t>(rope_.packing.group_size),
        .bits = static_cast<size_t>(rope_.packing.bits),
    };
    return [call, copy = native_buffer_copies(inputs, outputs, rope_.buffers())] {
      copy();
      cpu::rope_append(call);
    };
  }

  Arrays composed(const Arrays& inputs) override {
    CacheStep step = compose_rope_append(inputs, rope_, stream());
    Arrays outputs = {step.result};
    outputs.insert(outputs.end(), step.buffers.begin(), step.buffers.end());
    return outputs;
  }

 private:
  struct Shape {
    uint32_t batch;
    uint32_t query_heads;
    uint32_t key_heads;
    uint32_t tokens;
    uint32_t width;
    uint32_t value_width;
  };

  Shape shape_of(const Arrays& inputs) const {
    const mx::Shape heads = shape_of_heads(inputs[0], width_of(inputs, rope_)).value();
    const auto size = [&](int axis) { return static_cast<uint32_t>(heads[axis]); };
    const uint32_t key_heads = inputs[1].shape(1);
    const uint32_t others = rope_.is_apart ? 0 : 2 * key_heads;
    return {size(0), size(1) - others, key_heads, size(2), size(3), uint32_t(value_width_of(inputs, rope_))};
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
    const int64_t width = which == 2 ? shape.value_width : which == 1 && rope_.begin > 0 ? rope_.begin : shape.width;
    const bool is_flat = array.ndim() == 3;
    const int64_t batch = array.strides(0);
    const int64_t head = is_flat ? width : array.strides(1);
    const int64_t token = array.strides(is_flat ? 1 : 2);
    const int64_t elements =
        width + (count - 1) * head + (int64_t(shape.batch) - 1) * batch + (int64_t(shape.tokens) - 1) * token;
    const int64_t item = array.itemsize();
    return {array, {batch, head, token}, before * head * item, elements * item};
  }

  // The columns of keys that all heads share; the queries stand in where there are none.
  Part shared_key_of(const Arrays& inputs, const Shape& shape) const {
    if (rope_.begin == 0) {
      return {inputs[0], {0, 0, 0}, 0, 0};
    }
    const mx::array& array = inputs.end()[-3];
    const int64_t batch = array.strides(0), token = array.strides(2);
    const int64_t elements = rope_.dims + (int64_t(shape.batch) - 1) * batch + (int64_t(shape.tokens) - 1) * token;
    return {array, {batch, 0, token}, 0, elements * int64_t(array.itemsize())};
  }

  bool is_heads(const Arrays& inputs, size_t i) const {
    return i == 0 || (rope_.is_apart && i + 2 + (rope_.begin > 0) >= inputs.size());
  }

  bool is_buffer(size_t i) const {
    return i >= 1 && i <= rope_.buffers();
  }

  bool is_packed() const {
    return rope_.packing.bits != 0;
  }

  // The first buffer of either.
  static const mx::array& keys(const Arrays& inputs) {
    return inputs[1];
  }
  const mx::array& values(const Arrays& inputs) const {
    return inputs[1 + rope_.buffers() / 2];
  }

  // Where the new keys (0) or values (1) go.
  cpu::CacheBuffer native_buffer(Arrays& outputs, int which) const {
    mx::array* first = &outputs[1 + which * rope_.buffers() / 2];
    return is_packed() ? cpu::CacheBuffer{data_of(first[0]), data_of(first[1]), data_of(first[2])}
                       : cpu::CacheBuffer{data_of(first[0])};
  }

  const mx::array* freqs(const Arrays& inputs) const {
    return rope_.has_freqs ? &inputs[1 + rope_.buffers()] : nullptr;
  }

  // Of queries (0) or keys (1).
  const mx::array* norm(const Arrays& inputs, int which) const {
    return rope_.has_norms ? &inputs[1 + rope_.buffers() + rope_.has_freqs + which] : nullptr;
  }

  const mx::array* value_norm(const Arrays& inputs) const {
    const size_t before = 1 + rope_.buffers() + rope_.has_freqs + 2 * rope_.has_norms;
    return rope_.has_value_norm ? &inputs[before] : nullptr;
  }

  const mx::array* offsets(const Arrays& inputs) const {
    return rope_.has_offsets ? &inputs[1 + rope_.buffers() + rope_.has_freqs + rope_.norms()] : nullptr;
  }

  Rope rope_;
};

// Whether a buffer has the type and the columns for heads of a width: elements, or words (0), scales and biases.
bool holds_heads(const mx::array& buffer, size_t which, int width, const Packing& packing, mx::Dtype dtype) {
  if (packing.bits == 0) {
    return buffer.dtype() == dtype && buffer.shape(3) == width;
  }
  if (which == 0) {
    return buffer.dtype() == mx::uint32 && width % packing.group_size == 0 &&
           buffer.shape(3) == width / 32 * packing.bits;
  }
  return buffer.dtype() == dtype && buffer.shape(3) == width / packing.group_size;
}

}  // namespace

std::shared_ptr<KernelPrimitive> rope_append_primitive(const Rope& rope, mx::Stream stream) {
  return std::make_shared<RopeAppend>(stream, rope);
}

void check_rotary(const char* op, const Rotary& rotary, const mx::array& heads) {
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

void check_offset(const char* op, const Offset& offset, const mx::array& batched) {
  const auto* offsets = std::get_if<mx::array>(&offset);
  if (!offsets) {
    return;
  }
  if (!mx::issubdtype(offsets->dtype(), mx::integer)) {
    checks::fail<DtypeError>(op, "offset has dtype ", offsets->dtype(), ": expected an integer");
  }
  const bool is_one = offsets->ndim() <= 1 && offsets->size() == 1;
  if (!is_one && offsets->shape() != mx::Shape{batched.shape(0)}) {
    checks::fail(op, "offset has shape ", offsets->shape(), ": expected one number, or (", batched.shape(0),
                 "), one for each row of the batch");
  }
}

void check_room(const char* op, const char* name, const mx::array& buffer, const mx::array& heads, int start) {
  const int tokens = heads.shape(tokens_axis);
  if (start < 0 || tokens > buffer.shape(tokens_axis) - start) {
    checks::fail(op, name, " has room for ", buffer.shape(tokens_axis), " tokens: expected ", tokens, " of them from ",
                 start, " on to fit");
  }
}

namespace {

// Whether the heads may have columns of keys that they share, behind their own.
bool may_share_key(const mx::array& queries, const mx::array& keys, const mx::array& values, const Packing& packing,
                   const Rotary& rotary) {
  const auto& shared = rotary.shared_key;
  return packing.bits == 0 && !rotary.query_norm && !rotary.value_norm && rotary.query_scale == 1.0f &&
         queries.ndim() == 4 && keys.ndim() == 4 && values.ndim() == 4 && keys.shape(3) == rotary.begin && shared &&
         shared->dtype() == keys.dtype() && shared->shape() == mx::Shape{keys.shape(0), 1, keys.shape(2), rotary.dims};
}

}  // namespace

std::optional<Append> rope_append_of(const mx::array& new_queries, const mx::array& new_keys,
                                     const mx::array& new_values, const Arrays& buffers, const Packing& packing,
                                     const Rotary& rotary, const Offset& offset, int start, mx::Stream stream) {
  const mx::Dtype dtype = new_queries.dtype();
  // mx packs 1 bit by another rule.
  if (!has_kernels(dtype) || packing.bits == 1 || start < 0 || buffers.size() != buffers_of(packing) ||
      std::any_of(buffers.begin(), buffers.end(), [](const mx::array& a) { return a.ndim() != 4; })) {
    return std::nullopt;
  }
  const size_t each = buffers.size() / 2;
  const bool is_packed = packing.bits != 0;
  if (rotary.begin > 0 && !may_share_key(new_queries, new_keys, new_values, packing, rotary)) {
    return std::nullopt;
  }
  const int columns = buffers[0].shape(3);
  const int width = rotary.begin > 0       ? rotary.begin + rotary.dims
                    : new_keys.ndim() == 4 ? new_keys.shape(3)
                    : is_packed            ? static_cast<int>(int64_t(columns) * 32 / packing.bits)
                                           : columns;
  const int value_width = is_packed ? width : buffers[1].shape(3);
  const auto queries = shape_of_heads(new_queries, width);
  auto fresh_keys = shape_of_heads(new_keys, width);
  const auto fresh_values = shape_of_heads(new_values, value_width);
  if (!queries || !fresh_keys || !fresh_values || (is_packed && rotary.value_norm)) {
    return std::nullopt;
  }
  if (rotary.begin > 0) {
    (*fresh_keys)[3] = width;
  }
  const int key_heads = (*fresh_keys)[1], batch = (*queries)[0], tokens = (*queries)[2];
  if (*fresh_keys != mx::Shape{batch, key_heads, tokens, (*queries)[3]} ||
      *fresh_values != mx::Shape{batch, key_heads, tokens, value_width}) {
    return std::nullopt;
  }
  if (new_keys.dtype() != dtype || new_values.dtype() != dtype) {
    return std::nullopt;
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    const mx::array& buffer = buffers[i];
    if (buffer.shape(0) != batch || buffer.shape(1) != key_heads ||
        buffer.shape(tokens_axis) != buffers[i / each * each].shape(tokens_axis) ||
        tokens > buffer.shape(tokens_axis) - start ||
        !holds_heads(buffer, i % each, i < each ? width : value_width, packing, dtype)) {
      return std::nullopt;
    }
  }
  try {
    check_rotary("rope_append", rotary, mx::array({width}, dtype, nullptr, {}));
    check_offset("rope_append", offset, buffers[0]);
  } catch (const std::invalid_argument&) {  // which the caller's own op says
    return std::nullopt;
  }
  mx::Shape heads = *queries;
  heads[1] += 2 * key_heads;
  const bool goes_to_mx = packing.bits ? is_switched_off("quantized_rope_append")
                                       : prefer_mx_append(heads, dtype, rotary.query_norm.has_value(), stream);
  if (goes_to_mx) {
    return std::nullopt;
  }
  Append append{rope_append_primitive(rope_of(rotary, offset, start, packing, true), stream),
                inputs_of(new_queries, buffers, rotary, offset, stream), *queries, buffers.size()};
  if (rotary.begin > 0) {
    append.inputs.push_back(*rotary.shared_key);
  }
  append.inputs.push_back(new_keys);
  append.inputs.push_back(new_values);
  return append;
}

bool prefer_mx_append(const mx::Shape& heads, mx::Dtype dtype, bool has_norms, mx::Stream stream) {
  const auto size = [&](int axis) { return static_cast<size_t>(heads[axis]); };
  const Problem problem{"rope_append",
                        dtype,
                        has_norms,
                        {problem_size(size(0) * size(1)), problem_size(size(2)), problem_size(size(3)), 1}};
  return prefer_mx(problem, nullptr, stream);
}

bool may_be_a_step(const Append& append) {
  return mlx_internals::is_known() &&
         std::none_of(append.inputs.begin(), append.inputs.end(), [](const mx::array& a) { return a.is_tracer(); });
}

CacheStep apply_rope_append(Append append) {
  if (may_be_a_step(append)) {
    return cache_step(std::move(append), std::nullopt);
  }
  std::vector<mx::Dtype> dtypes;
  for (size_t i = 0; i <= append.buffers; ++i) {
    dtypes.push_back(append.inputs[i].dtype());
  }
  std::vector<mx::Shape> shapes = append.primitive->output_shapes(append.inputs);
  Arrays outputs = mx::array::make_arrays(std::move(shapes), dtypes, append.primitive, append.inputs);
  CacheStep step{std::move(outputs[0]), {}};
  step.buffers.assign(outputs.begin() + 1, outputs.end());
  return step;
}

}  // namespace mittens
