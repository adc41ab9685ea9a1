#include "ops/cache/rope_append_primitive.h"

#include <cmath>
#include <utility>

#include "cpu/cache/rope_append.h"
#include "mlx/ops.h"
#include "ops/cache/buffer_copies.h"
#include "ops/norm/weight_offset.h"
#include "params/cache.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/cpu_types.h"
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

int width_of(const Arrays& inputs, const Rope& rope) {
  const int columns = inputs[1].shape(3);
  return rope.packing.bits == 0 ? columns : static_cast<int>(int64_t(columns) * 32 / rope.packing.bits);
}

int value_width_of(const Arrays& inputs, const Rope& rope) {
  return rope.packing.bits == 0 ? inputs[2].shape(3) : width_of(inputs, rope);
}

namespace {

const Name file = "cache/rope_append.metal";
const Name quantized_file = "cache/quantized_rope_append.metal";

// heads, buffers, frequencies, norms of queries and of keys and offsets, if there are any, and where all heads are
// queries, the key that heads share, if there is one, new keys and values -> queries and the buffers, in place
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

}  // namespace

std::shared_ptr<KernelPrimitive> rope_append_primitive(const Rope& rope, mx::Stream stream) {
  return std::make_shared<RopeAppend>(stream, rope);
}

}  // namespace mittens
