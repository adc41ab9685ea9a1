// rope_append and quantized_rope_append by mx operations.
#include "mlx/fast.h"
#include "mlx/ops.h"
#include "ops/cache/rope_append_primitive.h"
#include "ops/norm/norms.h"

namespace mittens {

namespace {

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

}  // namespace mittens
