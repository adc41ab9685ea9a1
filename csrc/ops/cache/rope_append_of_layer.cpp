// The append of a layer's new queries, keys and values, which other ops take into theirs.
#include <algorithm>
#include <stdexcept>
#include <utility>

#include "mlx_internals/known.h"
#include "ops/cache/rope_append_checks.h"
#include "ops/cache/rope_append_primitive.h"
#include "runtime/calibration.h"
#include "runtime/fallback.h"

namespace mittens {

namespace {

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
