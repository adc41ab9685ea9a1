// What a layer does with a key/value cache at every token, in one call: indexing four arrays from Python costs the host
// more than the layer's attention.

#include "patch/kv_cache.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include "mlx/ops.h"
#include "ops/attention/attention.h"
#include "patch/deferred_rope.h"
#include "patch/nn_module.h"
#include "python/registry.h"
#include "runtime/checks.h"
#include "runtime/exact.h"
#include "runtime/exporting.h"
#include "runtime/fallback.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace mittens {

namespace {

PyObject* offset_name() {
  static PyObject* const offset = name("offset");
  return offset;
}

bool has_room(const mx::array& buffer, const mx::array& fresh, int first) {
  if (buffer.ndim() != 4 || fresh.ndim() != 4 || first < 0) {
    return false;
  }
  for (int d : {0, 1, 3}) {
    if (buffer.shape(d) != fresh.shape(d)) {
      return false;
    }
  }
  return fresh.shape(tokens_axis) <= buffer.shape(tokens_axis) - first;
}

// A buffer's tokens up to `end`.
mx::array tokens_until(const mx::array& buffer, int end) {
  mx::Shape stop = buffer.shape();
  stop[tokens_axis] = end;
  return mx::slice(buffer, mx::Shape(4, 0), stop);
}

// The buffer with the fresh tokens from `first` on.
mx::array appended(const mx::array& buffer, const mx::array& fresh, int first) {
  mx::Shape start(4, 0);
  mx::Shape stop = buffer.shape();
  start[tokens_axis] = first;
  stop[tokens_axis] = first + fresh.shape(tokens_axis);
  return mx::slice_update(buffer, fresh, start, stop);
}

// The buffers become what they are now, as by mx's own assignment to a part of an array: who else holds the Python
// objects sees it too.
void replace(mx::array& keys, mx::array& values, const mx::array& new_keys, const mx::array& new_values) {
  keys.overwrite_descriptor(new_keys);
  values.overwrite_descriptor(new_values);
}

void replace(mx::array& keys, mx::array& values, const CacheStep& step) {
  replace(keys, values, step.buffers[0], step.buffers[1]);
}

using Seen = std::pair<mx::array, mx::array>;

// Puts new tokens into the buffers from `first` on; what these hold up to `end`, none if there is no room.
std::optional<Seen> put_into_cache(mx::array& keys, mx::array& values, const mx::array& new_keys,
                                   const mx::array& new_values, int first, int end) {
  if (!has_room(keys, new_keys, first) || !has_room(values, new_values, first)) {
    return std::nullopt;
  }
  if (const auto step = append_with_rope({keys, values}, {}, new_keys, new_values, first)) {
    replace(keys, values, *step);
    return Seen{tokens_until(keys, end), tokens_until(values, end)};
  }
  const mx::array all_keys = appended(keys, new_keys, first), all_values = appended(values, new_values, first);
  replace(keys, values, all_keys, all_values);
  return Seen{tokens_until(all_keys, end), tokens_until(all_values, end)};
}

std::optional<Seen> append_to_cache(mx::array& keys, mx::array& values, const mx::array& new_keys,
                                    const mx::array& new_values, int first) {
  const int tokens = new_keys.ndim() == 4 ? new_keys.shape(tokens_axis) : 0;
  return put_into_cache(keys, values, new_keys, new_values, first, first + tokens);
}

// mlx-lm's KVCache.update_and_fetch, but where the cache has no room or is of another class.
std::optional<Seen> try_update_and_fetch(const nb::object& cache, const mx::array& new_keys,
                                         const mx::array& new_values) {
  auto plain = PlainCache::of(cache);
  if (!plain) {
    return std::nullopt;
  }
  auto seen = append_to_cache(plain->keys(), plain->values(), new_keys, new_values, plain->offset());
  if (seen) {
    plain->advance(new_keys.shape(tokens_axis));
  }
  return seen;
}

// mlx-lm's ChunkedKVCache.update_and_fetch, but where the cache has no room.
std::optional<Seen> try_chunked_update_and_fetch(const nb::object& cache, const mx::array& new_keys,
                                                 const mx::array& new_values) {
  static PyObject* const start_name = name("start_position");
  auto chunk = PlainCache::of(cache, PlainCache::Kind::chunked);
  if (!chunk) {
    return std::nullopt;
  }
  const int first = chunk->offset() - attribute<int>(cache, start_name);
  auto seen = append_to_cache(chunk->keys(), chunk->values(), new_keys, new_values, first);
  if (seen) {
    chunk->advance(new_keys.shape(tokens_axis));
  }
  return seen;
}

// mlx-lm's BatchKVCache.update_and_fetch, but where the cache has no room. Its offset is an array, one a row.
std::optional<Seen> try_batch_update_and_fetch(const nb::object& cache, const mx::array& new_keys,
                                               const mx::array& new_values) {
  static PyObject* const module = name("mlx_lm.models.cache");
  static PyObject* const batch = name("BatchKVCache");
  static PyObject* const index_name = name("_idx");
  static PyObject* const names[] = {name("keys"), name("values")};
  if (!cache.type().is(member(module, batch))) {
    return std::nullopt;
  }
  const nb::object keys = attribute(cache, names[0]), values = attribute(cache, names[1]);
  const nb::object offsets = attribute(cache, offset_name());
  if (!as_array(keys) || !as_array(values) || !as_array(offsets) || new_keys.ndim() != 4) {
    return std::nullopt;
  }
  const int index = attribute<int>(cache, index_name), tokens = new_keys.shape(tokens_axis);
  auto seen =
      append_to_cache(*nb::inst_ptr<mx::array>(keys), *nb::inst_ptr<mx::array>(values), new_keys, new_values, index);
  if (seen) {
    const mx::array& positions = *as_array(offsets);
    nb::setattr(cache, nb::handle(offset_name()), nb::cast(mx::add(positions, mx::array(tokens, positions.dtype()))));
    nb::setattr(cache, nb::handle(index_name), nb::int_(index + tokens));
  }
  return seen;
}

// Words, scales and biases of a quantized cache's keys or values, as mlx-lm holds them; none where there are no such.
using Held = std::array<mx::array*, 3>;

std::optional<Held> held_triple(nb::handle triple) {
  if (!nb::isinstance<nb::tuple>(triple) && !nb::isinstance<nb::list>(triple)) {
    return std::nullopt;
  }
  const auto sequence = nb::borrow<nb::sequence>(triple);
  Held held{};
  if (nb::len(sequence) != held.size()) {
    return std::nullopt;
  }
  for (size_t i = 0; i < held.size(); ++i) {
    held[i] = as_array(nb::object(sequence[i]));  // which the sequence keeps
    if (!held[i]) {
      return std::nullopt;
    }
  }
  return held;
}

// mlx-lm's QuantizedKVCache.update_and_fetch where the keys have just been turned and the cache has room: a tuple of
// keys and of values, each of words, scales and biases. None otherwise.
nb::object try_quantized_update_and_fetch(const nb::object& cache, const mx::array& new_keys,
                                          const mx::array& new_values) {
  static PyObject* const module = name("mlx_lm.models.cache");
  static PyObject* const quantized = name("QuantizedKVCache");
  static PyObject* const names[] = {name("keys"), name("values")};
  static PyObject* const group_size = name("group_size");
  static PyObject* const bits = name("bits");
  if (!cache.type().is(member(module, quantized)) || new_keys.ndim() != 4) {
    return nb::none();
  }
  const nb::object kept[] = {attribute(cache, names[0]), attribute(cache, names[1])};
  Arrays buffers;
  std::array<Held, 2> held;
  for (int i : {0, 1}) {
    const auto found = held_triple(kept[i]);
    if (!found) {
      return nb::none();
    }
    held[i] = *found;
    for (const mx::array* array : held[i]) {
      buffers.push_back(*array);
    }
  }
  const Packing packing{attribute<int>(cache, group_size), attribute<int>(cache, bits)};
  const int first = attribute<int>(cache, offset_name());
  const auto step = append_with_rope(buffers, packing, new_keys, new_values, first);
  if (!step) {
    return nb::none();
  }
  const int end = first + new_keys.shape(tokens_axis);
  nb::object seen[2];
  for (int i : {0, 1}) {
    for (size_t j = 0; j < held[i].size(); ++j) {
      held[i][j]->overwrite_descriptor(step->buffers[3 * i + j]);
    }
    const auto until = [&](size_t j) { return nb::cast(tokens_until(*held[i][j], end)); };
    seen[i] = nb::make_tuple(until(0), until(1), until(2));
  }
  nb::setattr(cache, nb::handle(offset_name()), nb::int_(end));
  return nb::make_tuple(seen[0], seen[1]);
}

// mlx-lm's RotatingKVCache.update_and_fetch of one token, but where the buffers grow or shrink.
std::optional<Seen> try_rotating_update_and_fetch(const nb::object& cache, const mx::array& new_keys,
                                                  const mx::array& new_values) {
  static PyObject* const index_name = name("_idx");
  static PyObject* const most_name = name("max_size");
  static PyObject* const kept_name = name("keep");
  auto buffers = PlainCache::of(cache, PlainCache::Kind::rotating);
  if (!buffers || new_keys.ndim() != 4 || new_keys.shape(tokens_axis) != 1 || buffers->keys().ndim() != 4) {
    return std::nullopt;
  }
  const int most = attribute<int>(cache, most_name), size = buffers->keys().shape(tokens_axis);
  const int end = buffers->offset() + 1;
  if (size > most || (end > size && size < most)) {
    return std::nullopt;
  }
  int index = attribute<int>(cache, index_name);
  index = index == most ? attribute<int>(cache, kept_name) : index;
  auto seen = put_into_cache(buffers->keys(), buffers->values(), new_keys, new_values, index, std::min(end, size));
  if (seen) {
    buffers->advance(1);
    nb::setattr(cache, nb::handle(index_name), nb::int_(index + 1));
  }
  return seen;
}

// The same of mlx-lm's BatchRotatingKVCache.
std::optional<Seen> try_batch_rotating_update_and_fetch(const nb::object& cache, const mx::array& new_keys,
                                                        const mx::array& new_values) {
  static PyObject* const module = name("mlx_lm.models.cache");
  static PyObject* const batch = name("BatchRotatingKVCache");
  static PyObject* const names[] = {name("keys"), name("values")};
  static PyObject* const index_name = name("_idx");
  static PyObject* const count_name = name("_offset");
  static PyObject* const most_name = name("max_size");
  static PyObject* const rotated_name = name("rotated");
  static PyObject* const lengths_name = name("_lengths");
  static PyObject* const padding_name = name("left_padding");
  if (!cache.type().is(member(module, batch)) || !attribute(cache, lengths_name).is_none()) {
    return std::nullopt;
  }
  const nb::object keys = attribute(cache, names[0]), values = attribute(cache, names[1]);
  const nb::object offsets = attribute(cache, offset_name()), padding = attribute(cache, padding_name);
  if (!as_array(keys) || !as_array(values) || !as_array(offsets) || !as_array(padding) || new_keys.ndim() != 4 ||
      new_keys.shape(tokens_axis) != 1 || as_array(keys)->ndim() != 4) {
    return std::nullopt;
  }
  const int most = attribute<int>(cache, most_name), size = as_array(keys)->shape(tokens_axis);
  const int end = attribute<int>(cache, count_name) + 1;
  if (size > most || (end > size && size < most)) {
    return std::nullopt;
  }
  int index = attribute<int>(cache, index_name);
  const bool rotated = index == most || attribute<bool>(cache, rotated_name);
  index = index == most ? 0 : index;
  auto seen = put_into_cache(*as_array(keys), *as_array(values), new_keys, new_values, index, std::min(end, size));
  if (!seen) {
    return std::nullopt;
  }
  const mx::array one(1, as_array(offsets)->dtype());
  const mx::array positions = mx::add(*as_array(offsets), one);
  if (rotated) {
    mx::array& paddings = *as_array(padding);
    paddings.overwrite_descriptor(mx::subtract(paddings, mx::array(1, paddings.dtype())));
  }
  nb::setattr(cache, nb::handle(offset_name()), nb::cast(positions));
  nb::setattr(cache, nb::handle(count_name), nb::int_(end));
  nb::setattr(cache, nb::handle(index_name), nb::int_(index + 1));
  nb::setattr(cache, nb::handle(rotated_name), nb::bool_(rotated));
  // What counts positions is computed at every step, also where no mask of the model reads it.
  seen->first = mx::depends({seen->first}, {*as_array(padding), positions})[0];
  return seen;
}

bool is_nothing(const std::optional<Seen>& seen) {
  return !seen;
}

bool is_nothing(const nb::object& seen) {
  return seen.is_none();
}

// An update_and_fetch whose keys are turned alike where the cache itself is to append them: a token's keys and queries
// then have the same bits in every call.
template <auto try_update>
auto with_keys_alike(const nb::object& cache, mx::array& new_keys, const mx::array& new_values) {
  auto seen = try_update(cache, new_keys, new_values);
  if (is_exact() && is_nothing(seen)) {
    turn_as_append_does(new_keys, new_values);
  }
  return seen;
}

// The append of a layer's heads of queries, keys and values, of which it turns queries and keys.
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

// The attention of one token's queries over the buffers' tokens up to `end`; null where no kernel covers it.
std::shared_ptr<mx::Primitive> attention_until(const mx::array& keys, const mx::array& values, int query_heads, int end,
                                               float scale, mx::Stream stream) {
  mx::Shape seen_keys = keys.shape(), seen_values = values.shape();
  seen_keys[tokens_axis] = seen_values[tokens_axis] = end;
  return try_attention_primitive({keys.shape(0), query_heads, 1, keys.shape(3)}, seen_keys, seen_values, keys.dtype(),
                                 scale, stream);
}

// Appends one token and attends, in one primitive; the buffers become those that hold it.
mx::array append_and_attend(Append append, std::shared_ptr<mx::Primitive> attention, mx::array& keys, mx::array& values,
                            int first) {
  const mx::Shape shape = append.queries;
  const CacheStep step = cache_step(std::move(append), Attending{std::move(attention), shape, first + 1});
  replace(keys, values, step);
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
    attention = append ? attention_until(keys, values, append->queries[1], first + 1, scale, stream) : nullptr;
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
  return append_and_attend(*std::move(append), std::move(attention), keys, values, first);
}

void bind(nb::module_& module) {
  module.def("try_update_and_fetch", &with_keys_alike<try_update_and_fetch>, "cache"_a, "keys"_a, "values"_a);
  module.def("try_chunked_update_and_fetch", &with_keys_alike<try_chunked_update_and_fetch>, "cache"_a, "keys"_a,
             "values"_a);
  module.def("try_batch_update_and_fetch", &with_keys_alike<try_batch_update_and_fetch>, "cache"_a, "keys"_a,
             "values"_a);
  module.def("try_rotating_update_and_fetch", &with_keys_alike<try_rotating_update_and_fetch>, "cache"_a, "keys"_a,
             "values"_a);
  module.def("try_batch_rotating_update_and_fetch", &with_keys_alike<try_batch_rotating_update_and_fetch>, "cache"_a,
             "keys"_a, "values"_a);
  module.def("try_quantized_update_and_fetch", &with_keys_alike<try_quantized_update_and_fetch>, "cache"_a, "keys"_a,
             "values"_a);
  module.def(
      "append_to_cache", &append_to_cache, "keys"_a, "values"_a, "new_keys"_a, "new_values"_a, "first"_a,
      "Puts new tokens into the buffers of keys and values from `first` on. Both up to the last of them; none if "
      "there is no room.");
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

PlainCache::PlainCache(nb::handle cache, nb::object keys, nb::object values)
    : cache_(nb::borrow(cache)),
      keys_(std::move(keys)),
      values_(std::move(values)),
      offset_(attribute<int>(cache, offset_name())) {}

std::optional<PlainCache> PlainCache::of(nb::handle cache, Kind kind) {
  static PyObject* const module = name("mlx_lm.models.cache");
  static PyObject* const classes[] = {name("KVCache"), name("RotatingKVCache"), name("ChunkedKVCache")};
  static PyObject* const names[] = {name("keys"), name("values")};
  if (!cache.type().is(member(module, classes[static_cast<int>(kind)]))) {
    return std::nullopt;
  }
  nb::object keys = attribute(cache, names[0]);
  nb::object values = attribute(cache, names[1]);
  if (!as_array(keys) || !as_array(values)) {
    return std::nullopt;
  }
  return PlainCache(cache, std::move(keys), std::move(values));
}

void PlainCache::advance(int tokens) {
  offset_ += tokens;
  nb::setattr(cache_, nb::handle(offset_name()), nb::int_(offset_));
}

std::shared_ptr<mx::Primitive> attention_of_token(const PlainCache& cache, int query_heads, float scale, bool has_norms,
                                                  mx::Stream stream) {
  const int end = cache.offset() + 1;
  for (const auto* buffer : {&cache.keys(), &cache.values()}) {
    if (buffer->ndim() != 4 || buffer->dtype() != cache.keys().dtype() || end < 1 || end > buffer->shape(tokens_axis)) {
      return nullptr;
    }
  }
  const Tentative tentative;
  const mx::array& keys = cache.keys();
  const mx::Shape heads = {keys.shape(0), query_heads + 2 * keys.shape(1), 1, keys.shape(3)};
  if (prefer_mx_append(heads, keys.dtype(), has_norms, stream)) {
    return nullptr;
  }
  try {
    return attention_until(cache.keys(), cache.values(), query_heads, end, scale, stream);
  } catch (const std::invalid_argument&) {  // the model's own call says what is wrong
    return nullptr;
  }
}

std::optional<mx::array> attend(PlainCache& cache, std::shared_ptr<mx::Primitive> attention, const mx::array& queries,
                                const mx::array& keys, const mx::array& values, const Rotary& rotary,
                                mx::Stream stream) {
  const int first = cache.offset();
  const Tentative tentative;
  auto append = rope_append_of(queries, keys, values, {cache.keys(), cache.values()}, {}, rotary, first, first, stream);
  if (!append || !may_be_a_step(*append)) {
    return std::nullopt;
  }
  mx::array y = append_and_attend(*std::move(append), std::move(attention), cache.keys(), cache.values(), first);
  cache.advance(1);
  return y;
}

}  // namespace mittens
