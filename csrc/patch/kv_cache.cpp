// A layer's use of its key/value cache at every token, in one call: indexing four arrays from Python costs the host
// more than the layer's attention.

#include "patch/kv_cache.h"

#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include "mlx/ops.h"
#include "ops/attention/attention.h"
#include "ops/cache/cache_step.h"
#include "patch/cache_buffers.h"
#include "patch/deferred_rope.h"
#include "python/registry.h"
#include "runtime/checks.h"
#include "runtime/exporting.h"
#include "runtime/fallback.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace mittens {

using namespace cache_buffers;

namespace {

// The append of a layer's keys and values, which also turns queries and keys.
std::optional<Append> append_of(const mx::array& heads, const mx::array& keys, const mx::array& values,
                                const Rotary& rotary, int first, mx::Stream stream) {
  if (heads.ndim() != 4 || keys.ndim() != 4 || heads.shape(1) <= 2 * keys.shape(1)) {
    return std::nullopt;
  }
  for (const auto* buffer : {&keys, &values}) {
    if (buffer->ndim() != 4 || buffer->dtype() != heads.dtype() ||
        heads.shape(tokens_axis) > buffer->shape(tokens_axis) - first) {
      return std::nullopt;
    }
  }
  return rope_append_of(heads, keys, values, rotary, first, first, stream);
}

using TurnedAndSeen = std::tuple<mx::array, mx::array, mx::array>;

std::optional<TurnedAndSeen> turn_into_cache(const mx::array& heads, mx::array& keys, mx::array& values,
                                             const Rotary& rotary, int first) {
  if (exporting()) {
    return std::nullopt;
  }
  auto append = append_of(heads, keys, values, rotary, first, checks::checked_stream("turn_into_cache", {}));
  if (!append) {
    return std::nullopt;
  }
  const CacheStep step = apply_rope_append(*std::move(append));
  const int end = first + heads.shape(tokens_axis);
  replace(keys, values, step);
  return TurnedAndSeen{step.result, tokens_until(keys, end), tokens_until(values, end)};
}

// The attention of one token's queries over tokens up to `end`, of keys and values of these shapes; null where no
// kernel covers it.
std::shared_ptr<mx::Primitive> attention_until(mx::Shape keys, mx::Shape values, mx::Dtype dtype, int query_heads,
                                               int end, const AttentionOptions& options, mx::Stream stream) {
  keys[tokens_axis] = values[tokens_axis] = end;
  return try_attention_primitive({keys[0], query_heads, 1, keys[3]}, keys, values, dtype, options, stream);
}

// Appends one token and attends, in one primitive; updates the buffers.
mx::array append_and_attend(Append append, std::shared_ptr<mx::Primitive> attention,
                            const std::vector<mx::array*>& buffers, int first) {
  const mx::Shape shape = append.queries;
  const CacheStep step = cache_step(std::move(append), Attending{std::move(attention), shape, first + 1});
  for (size_t i = 0; i < buffers.size(); ++i) {
    buffers[i]->overwrite_descriptor(step.buffers[i]);
  }
  return step.result;
}

// A token's attention over a cache, from its heads on.
std::optional<mx::array> attend_with_cache(const mx::array& heads, mx::array& keys, mx::array& values,
                                           const Rotary& rotary, int first, float scale) {
  if (exporting() || heads.ndim() != 4 || heads.shape(tokens_axis) != 1) {
    return std::nullopt;
  }
  const mx::Stream stream = checks::checked_stream("attend_with_cache", {});
  std::optional<Append> append;
  std::shared_ptr<mx::Primitive> attention;
  {
    const Tentative tentative;  // the append and the attention are asked for one by one then
    append = append_of(heads, keys, values, rotary, first, stream);
    attention = append ? attention_until(keys.shape(), values.shape(), keys.dtype(), append->queries[1], first + 1,
                                         {.scale = scale}, stream)
                       : nullptr;
  }
  if (!attention) {
    return std::nullopt;
  }
  const mx::Shape queries = append->queries;
  if (!may_be_a_step(*append)) {
    const CacheStep step = apply_rope_append(*std::move(append));
    const mx::array y(
        queries, heads.dtype(), std::move(attention),
        {step.result, tokens_until(step.buffers[0], first + 1), tokens_until(step.buffers[1], first + 1)});
    replace(keys, values, step);
    return mx::reshape(y, {y.shape(0), 1, -1}, stream);
  }
  return append_and_attend(*std::move(append), std::move(attention), {&keys, &values}, first);
}

void bind(nb::module_& module) {
  module.def("turn_into_cache", &turn_into_cache, "heads"_a, "keys"_a, "values"_a, "rotary"_a, "first"_a,
             "Puts the turned keys and the values of a layer's heads into their buffers from `first` on. The turned "
             "queries, and the keys and values up to the last of them; none if there is no room.");
  module.def(
      "attend_with_cache", &attend_with_cache, "heads"_a, "keys"_a, "values"_a, "rotary"_a, "first"_a, "scale"_a,
      "Puts the keys and values of one token's heads into their buffers. Its attention over all so far, [batch, 1, "
      "heads * width]; none if there is no room or no kernel covers it.");
}

const Register registered(bind);

}  // namespace

LayerCache::LayerCache(nb::handle cache, nb::object keys, nb::object values, std::vector<mx::array*> buffers,
                       Packing packing)
    : cache_(nb::borrow(cache)),
      keys_(std::move(keys)),
      values_(std::move(values)),
      buffers_(std::move(buffers)),
      packing_(packing),
      offset_(attribute<int>(cache, offset_name())) {}

std::optional<LayerCache> LayerCache::of(nb::handle cache) {
  static PyObject* const plain = name("KVCache");
  static PyObject* const quantized = name("QuantizedKVCache");
  static PyObject* const group_size = name("group_size");
  static PyObject* const bits = name("bits");
  const bool is_plain = is_cache(cache, plain);
  if (!is_plain && !is_cache(cache, quantized)) {
    return std::nullopt;
  }
  nb::object kept[] = {attribute(cache, buffer_names()[0]), attribute(cache, buffer_names()[1])};
  std::vector<mx::array*> buffers;
  Packing packing;
  for (const nb::object& one : kept) {
    if (is_plain) {
      buffers.push_back(as_array(one));
    } else if (const auto held = held_triple(one)) {
      buffers.insert(buffers.end(), held->begin(), held->end());
    }
  }
  if (!is_plain) {
    packing = {attribute<int>(cache, group_size), attribute<int>(cache, bits)};
  }
  if (buffers.size() != buffers_of(packing) || packing.bits < 0 ||
      std::any_of(buffers.begin(), buffers.end(), [](const mx::array* a) { return !a || a->ndim() != 4; })) {
    return std::nullopt;
  }
  return LayerCache(cache, std::move(kept[0]), std::move(kept[1]), std::move(buffers), packing);
}

mx::Shape LayerCache::keys() const {
  return unpacked(*buffers_[0], packing_.bits);
}

mx::Shape LayerCache::values() const {
  return unpacked(*buffers_[buffers_.size() / 2], packing_.bits);
}

mx::Dtype LayerCache::dtype() const {
  return buffers_[packing_.bits ? 1 : 0]->dtype();
}

void LayerCache::advance(int tokens) {
  offset_ += tokens;
  nb::setattr(cache_, nb::handle(offset_name()), nb::int_(offset_));
}

std::shared_ptr<mx::Primitive> attention_of_token(const LayerCache& cache, int query_heads, float scale, bool has_norms,
                                                  mx::Stream stream) {
  const int end = cache.offset() + 1;
  const Packing& packing = cache.packing();
  const mx::Dtype dtype = cache.dtype();
  for (const mx::array* buffer : cache.buffers()) {
    const bool has_type = buffer->dtype() == dtype || (packing.bits && buffer->dtype() == mx::uint32);
    if (!has_type || end < 1 || end > buffer->shape(tokens_axis)) {
      return nullptr;
    }
  }
  const Tentative tentative;
  const mx::Shape keys = cache.keys();
  const mx::Shape heads = {keys[0], query_heads + 2 * keys[1], 1, keys[3]};
  if (packing.bits ? is_switched_off("quantized_rope_append") : prefer_mx_append(heads, dtype, has_norms, stream)) {
    return nullptr;
  }
  try {
    const AttentionOptions options{.scale = scale, .bits = packing.bits, .group_size = packing.group_size};
    return attention_until(keys, cache.values(), dtype, query_heads, end, options, stream);
  } catch (const std::invalid_argument&) {  // the model's own call raises the error
    return nullptr;
  }
}

std::optional<mx::array> attend(LayerCache& cache, std::shared_ptr<mx::Primitive> attention, const mx::array& queries,
                                const mx::array& keys, const mx::array& values, const Rotary& rotary,
                                mx::Stream stream) {
  const int first = cache.offset();
  const Tentative tentative;
  Arrays buffers;
  for (const mx::array* buffer : cache.buffers()) {
    buffers.push_back(*buffer);
  }
  auto append = rope_append_of(queries, keys, values, buffers, cache.packing(), rotary, first, first, stream);
  if (!append || !may_be_a_step(*append)) {
    return std::nullopt;
  }
  mx::array y = append_and_attend(*std::move(append), std::move(attention), cache.buffers(), first);
  cache.advance(1);
  return y;
}

}  // namespace mittens
