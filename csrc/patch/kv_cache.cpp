// A layer's use of its key/value cache at every token, in one call: indexing four arrays from Python costs the host
// more than the layer's attention.

#include "patch/kv_cache.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include "mlx/ops.h"
#include "ops/attention/attention.h"
#include "ops/cache/cache_step.h"
#include "patch/deferred_rope.h"
#include "patch/function_wrapper.h"
#include "patch/nn_module.h"
#include "python/registry.h"
#include "runtime/checks.h"
#include "runtime/numerics.h"
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

// Assigns to the buffers in place, as mx's own assignment to a part of an array: other holders of the Python objects
// see it too.
void replace(mx::array& keys, mx::array& values, const mx::array& new_keys, const mx::array& new_values) {
  keys.overwrite_descriptor(new_keys);
  values.overwrite_descriptor(new_values);
}

void replace(mx::array& keys, mx::array& values, const CacheStep& step) {
  replace(keys, values, step.buffers[0], step.buffers[1]);
}

using Seen = std::pair<mx::array, mx::array>;

// Puts new tokens into the buffers from `first` on; returns their tokens up to `end`, nullopt if there is no room.
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

// Names of a cache's attributes.
PyObject* const* buffer_names() {
  static PyObject* const names[] = {name("keys"), name("values")};
  return names;
}

bool is_cache(nb::handle cache, PyObject* kind) {
  static PyObject* const module = name("mlx_lm.models.cache");
  return cache.type().is(member(module, kind));
}

// Keys and values that a cache holds: no arrays where it is empty, nothing where it holds something else.
std::optional<Arrays> held_by(nb::handle cache) {
  const nb::object keys = attribute(cache, buffer_names()[0]), values = attribute(cache, buffer_names()[1]);
  if (keys.is_none() && values.is_none()) {
    return Arrays();
  }
  if (!as_array(keys) || !as_array(values)) {
    return std::nullopt;
  }
  return Arrays{*as_array(keys), *as_array(values)};
}

// The shape and type of one head's token in a buffer.
struct Item {
  int columns;
  mx::Dtype dtype;
};

mx::Stream stream_of(const mx::array& array) {
  return array.has_primitive() ? array.primitive().stream() : mx::to_stream({});
}

// A part of a buffer for a number of tokens, of heads like the fresh ones. Tokens that no append writes are zeros.
mx::array room_for(const mx::array& fresh, int tokens, const Item& item, bool is_all_written) {
  mx::Shape shape = {fresh.shape(0), fresh.shape(1), tokens, item.columns};
  const mx::Stream stream = stream_of(fresh);
  return is_all_written ? unwritten_buffer(std::move(shape), item.dtype, stream) : mx::zeros(shape, item.dtype, stream);
}

// A buffer's tokens from `first` to `end`.
mx::array tokens_between(const mx::array& buffer, int first, int end, mx::Stream stream) {
  mx::Shape start(4, 0), stop = buffer.shape();
  start[tokens_axis] = first;
  stop[tokens_axis] = end;
  return mx::slice(buffer, start, stop, stream);
}

// Whether a buffer has heads like the fresh ones, of such items: the parts of a grown buffer fit then.
bool holds(const mx::array& buffer, const mx::array& fresh, const Item& item) {
  return buffer.ndim() == 4 && buffer.shape(0) == fresh.shape(0) && buffer.shape(1) == fresh.shape(1) &&
         buffer.shape(3) == item.columns && buffer.dtype() == item.dtype;
}

// Runs of a buffer's tokens, one behind the other: [first, end) each.
using Runs = std::vector<std::pair<int, int>>;

// A buffer of these tokens, with room for more.
mx::array with_room(const mx::array& buffer, const Runs& runs, const mx::array& fresh, int more, const Item& item) {
  const mx::Stream stream = stream_of(fresh);
  Arrays parts;
  for (const auto& [first, end] : runs) {
    if (first < end) {
      parts.push_back(tokens_between(buffer, first, end, stream));
    }
  }
  if (more > 0 || parts.empty()) {
    parts.push_back(room_for(fresh, more, item, parts.empty() && more == fresh.shape(tokens_axis)));
  }
  return parts.size() == 1 ? parts[0] : mx::concatenate(std::move(parts), tokens_axis, stream);
}

// The buffers of a cache that grows by whole steps, or is made, for tokens from `first` on, as mlx-lm's do. A fresh
// array and an item for each; none where they do not fit.
std::optional<Arrays> grown_by_steps(nb::handle cache, const Arrays& held, const Arrays& fresh,
                                     const std::vector<Item>& items, int first) {
  static PyObject* const step_name = name("step");
  const int step = attribute<int>(cache, step_name), tokens = fresh[0].shape(tokens_axis);
  if (step <= 0 || first < 0 || tokens <= 0 || (held.empty() && first != 0)) {
    return std::nullopt;
  }
  const int more = (step + tokens - 1) / step * step;
  Arrays buffers;
  for (size_t i = 0; i < items.size(); ++i) {
    const int size = held.empty() ? 0 : held[i].ndim() == 4 ? held[i].shape(tokens_axis) : -1;
    if (size < 0 || first > size || (!held.empty() && !holds(held[i], fresh[i], items[i]))) {
      return std::nullopt;
    }
    const int kept = first % step != 0 ? first : size;
    buffers.push_back(held.empty() ? room_for(fresh[i], more, items[i], more == tokens)
                                   : with_room(held[i], {{0, kept}}, fresh[i], more, items[i]));
  }
  return buffers;
}

bool are_heads(const mx::array& new_keys, const mx::array& new_values) {
  return new_keys.ndim() == 4 && new_values.ndim() == 4 && new_keys.shape(tokens_axis) > 0 &&
         new_keys.shape(tokens_axis) == new_values.shape(tokens_axis);
}

// Puts new tokens from `first` on into buffers made for them, and these into the cache; returns their tokens up to
// `end`. nullopt where no append turns the keys: then the cache is as it was.
std::optional<Seen> put_into_new(nb::handle cache, const Arrays& buffers, const Arrays& held, const mx::array& new_keys,
                                 const mx::array& new_values, int first, int end) {
  const auto step = append_with_rope(buffers, {}, new_keys, new_values, first, held);
  if (!step) {
    return std::nullopt;
  }
  for (int i : {0, 1}) {
    nb::setattr(cache, nb::handle(buffer_names()[i]), nb::cast(step->buffers[i]));
  }
  return Seen{tokens_until(step->buffers[0], end), tokens_until(step->buffers[1], end)};
}

// The append to a cache that grows by whole steps where it has no room.
std::optional<Seen> append_or_grow(nb::handle cache, const mx::array& new_keys, const mx::array& new_values,
                                   int first) {
  const nb::object keys = attribute(cache, buffer_names()[0]), values = attribute(cache, buffer_names()[1]);
  if (as_array(keys) && as_array(values)) {
    if (auto seen = append_to_cache(*as_array(keys), *as_array(values), new_keys, new_values, first)) {
      return seen;
    }
  }
  const auto held = held_by(cache);
  if (!held || !are_heads(new_keys, new_values)) {
    return std::nullopt;
  }
  const int end = first + new_keys.shape(tokens_axis);
  if (!held->empty() && (*held)[0].ndim() == 4 && end <= (*held)[0].shape(tokens_axis)) {
    return std::nullopt;  // it has room, but not for these
  }
  const std::vector<Item> items = {{new_keys.shape(3), new_keys.dtype()}, {new_values.shape(3), new_values.dtype()}};
  const auto buffers = grown_by_steps(cache, *held, {new_keys, new_values}, items, first);
  return buffers ? put_into_new(cache, *buffers, *held, new_keys, new_values, first, end) : std::nullopt;
}

// mlx-lm's KVCache.update_and_fetch, but where the cache is of another class, or has no room and no append makes it.
std::optional<Seen> try_update_and_fetch(const nb::object& cache, const mx::array& new_keys,
                                         const mx::array& new_values) {
  static PyObject* const kind = name("KVCache");
  if (!is_cache(cache, kind)) {
    return std::nullopt;
  }
  const int first = attribute<int>(cache, offset_name());
  auto seen = append_or_grow(cache, new_keys, new_values, first);
  if (seen) {
    nb::setattr(cache, nb::handle(offset_name()), nb::int_(first + new_keys.shape(tokens_axis)));
  }
  return seen;
}

// The same of mlx-lm's ChunkedKVCache.
std::optional<Seen> try_chunked_update_and_fetch(const nb::object& cache, const mx::array& new_keys,
                                                 const mx::array& new_values) {
  static PyObject* const kind = name("ChunkedKVCache");
  static PyObject* const start_name = name("start_position");
  if (!is_cache(cache, kind)) {
    return std::nullopt;
  }
  const int offset = attribute<int>(cache, offset_name());
  auto seen = append_or_grow(cache, new_keys, new_values, offset - attribute<int>(cache, start_name));
  if (seen) {
    nb::setattr(cache, nb::handle(offset_name()), nb::int_(offset + new_keys.shape(tokens_axis)));
  }
  return seen;
}

// The same of mlx-lm's BatchKVCache. Its offset is an array, one a row.
std::optional<Seen> try_batch_update_and_fetch(const nb::object& cache, const mx::array& new_keys,
                                               const mx::array& new_values) {
  static PyObject* const kind = name("BatchKVCache");
  static PyObject* const index_name = name("_idx");
  if (!is_cache(cache, kind)) {
    return std::nullopt;
  }
  const nb::object offsets = attribute(cache, offset_name());
  if (!as_array(offsets)) {
    return std::nullopt;
  }
  const int index = attribute<int>(cache, index_name);
  auto seen = append_or_grow(cache, new_keys, new_values, index);
  if (seen) {
    const mx::array& positions = *as_array(offsets);
    const int tokens = new_keys.shape(tokens_axis);
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

// Columns of a head's token in the three buffers of a quantized cache; none where mlx-lm's would have others.
std::optional<std::vector<Item>> packed_items(const mx::array& fresh, const Packing& packing) {
  const int width = fresh.shape(3);
  if (packing.bits <= 0 || packing.bits > 32 || packing.group_size <= 0) {
    return std::nullopt;
  }
  const int words = width / (32 / packing.bits), groups = width / packing.group_size;
  if (int64_t(words) * 32 != int64_t(width) * packing.bits) {
    return std::nullopt;
  }
  return std::vector<Item>{{words, mx::uint32}, {groups, fresh.dtype()}, {groups, fresh.dtype()}};
}

// Puts new tokens from `first` on into a quantized cache, where the keys have just been turned: a tuple of keys and of
// values up to the last of them, each of words, scales and biases. None otherwise.
nb::object put_into_packed(const nb::object& cache, const mx::array& new_keys, const mx::array& new_values, int first) {
  static PyObject* const group_size = name("group_size");
  static PyObject* const bits = name("bits");
  if (!are_heads(new_keys, new_values)) {
    return nb::none();
  }
  const nb::object kept[] = {attribute(cache, buffer_names()[0]), attribute(cache, buffer_names()[1])};
  const bool is_empty = kept[0].is_none() && kept[1].is_none();
  Arrays buffers;
  std::array<Held, 2> held;
  for (int i : {0, 1}) {
    const auto found = is_empty ? Held{} : held_triple(kept[i]);
    if (!found) {
      return nb::none();
    }
    held[i] = *found;
    for (const mx::array* array : held[i]) {
      if (array) {
        buffers.push_back(*array);
      }
    }
  }
  const Packing packing{attribute<int>(cache, group_size), attribute<int>(cache, bits)};
  const int end = first + new_keys.shape(tokens_axis);
  const bool grows = is_empty || (buffers[0].ndim() == 4 && end > buffers[0].shape(tokens_axis));
  const Arrays made_of = buffers;
  if (grows) {
    auto items = packed_items(new_keys, packing);
    const auto of_values = packed_items(new_values, packing);
    if (!items || !of_values) {
      return nb::none();
    }
    items->insert(items->end(), of_values->begin(), of_values->end());
    const Arrays fresh = {new_keys, new_keys, new_keys, new_values, new_values, new_values};
    auto grown = grown_by_steps(cache, made_of, fresh, *items, first);
    if (!grown) {
      return nb::none();
    }
    buffers = *std::move(grown);
  }
  const auto step = append_with_rope(buffers, packing, new_keys, new_values, first, made_of);
  if (!step) {
    return nb::none();
  }
  nb::object seen[2];
  for (int i : {0, 1}) {
    const auto part = [&](size_t j) -> const mx::array& { return step->buffers[3 * i + j]; };
    if (grows) {
      const nb::tuple whole = nb::make_tuple(nb::cast(part(0)), nb::cast(part(1)), nb::cast(part(2)));
      nb::setattr(cache, nb::handle(buffer_names()[i]), whole);
    } else {
      for (size_t j = 0; j < held[i].size(); ++j) {
        held[i][j]->overwrite_descriptor(part(j));
      }
    }
    const auto until = [&](size_t j) { return nb::cast(tokens_until(part(j), end)); };
    seen[i] = nb::make_tuple(until(0), until(1), until(2));
  }
  return nb::make_tuple(seen[0], seen[1]);
}

// mlx-lm's QuantizedKVCache.update_and_fetch where the keys have just been turned.
nb::object try_quantized_update_and_fetch(const nb::object& cache, const mx::array& new_keys,
                                          const mx::array& new_values) {
  static PyObject* const kind = name("QuantizedKVCache");
  if (!is_cache(cache, kind)) {
    return nb::none();
  }
  const int first = attribute<int>(cache, offset_name());
  nb::object seen = put_into_packed(cache, new_keys, new_values, first);
  if (!seen.is_none()) {
    nb::setattr(cache, nb::handle(offset_name()), nb::int_(first + new_keys.shape(tokens_axis)));
  }
  return seen;
}

// The append to a batch of packed rows, whose next token goes to `_idx`.
nb::object try_append_packed(const nb::object& cache, const mx::array& new_keys, const mx::array& new_values) {
  static PyObject* const index_name = name("_idx");
  return put_into_packed(cache, new_keys, new_values, attribute<int>(cache, index_name));
}

// A rotating cache: it keeps the first `kept` tokens, and as many of the last as `most` leaves room for.
struct Rotating {
  Arrays held;  // keys and values; none where it is empty
  int tokens;  // all so far
  int index;  // where the next goes
  int most;
  int kept;
  int step;
  bool is_rotated;

  int size() const {
    return held.empty() ? 0 : held[0].shape(tokens_axis);
  }
};

// Where new tokens go in such a cache, and the part of it that attention sees then.
struct Place {
  std::optional<Arrays> made;  // its new buffers, where these grow or shrink
  int first;
  int end;
  int dropped;  // tokens that the buffers lose
  bool is_rotated;
};

std::optional<Rotating> rotating(nb::handle cache, const Arrays& held, int tokens, PyObject* kept_name) {
  static PyObject* const index_name = name("_idx");
  static PyObject* const most_name = name("max_size");
  static PyObject* const step_name = name("step");
  Rotating found{.held = held,
                 .tokens = tokens,
                 .index = attribute<int>(cache, index_name),
                 .most = attribute<int>(cache, most_name),
                 .kept = kept_name ? attribute<int>(cache, kept_name) : 0,
                 .step = attribute<int>(cache, step_name),
                 .is_rotated = false};
  const bool has_buffers = std::all_of(held.begin(), held.end(), [](const mx::array& a) { return a.ndim() == 4; });
  const bool is_sound = has_buffers && found.kept >= 0 && found.kept < found.most && found.index >= 0 &&
                        found.tokens >= 0 && (held.empty() ? found.tokens == 0 : found.index <= found.size()) &&
                        (held.empty() || held[1].shape(tokens_axis) == found.size());
  return is_sound ? std::optional(std::move(found)) : std::nullopt;
}

// Both buffers of these tokens, with room for more; none where they do not fit the fresh ones.
std::optional<Arrays> made_of_runs(const Rotating& cache, const Runs& runs, const mx::array& new_keys,
                                   const mx::array& new_values, int more) {
  Arrays made;
  for (int i : {0, 1}) {
    const mx::array& fresh = i == 0 ? new_keys : new_values;
    const Item item{fresh.shape(3), fresh.dtype()};
    if (cache.held.empty()) {
      made.push_back(room_for(fresh, more, item, more == fresh.shape(tokens_axis)));
    } else if (holds(cache.held[i], fresh, item)) {
      made.push_back(with_room(cache.held[i], runs, fresh, more, item));
    } else {
      return std::nullopt;
    }
  }
  return made;
}

// mlx-lm's _update_in_place of one token.
std::optional<Place> place_of_token(const Rotating& cache, const mx::array& new_keys, const mx::array& new_values) {
  int size = cache.size(), index = cache.index, more = 0;
  if (cache.held.empty() || (cache.tokens >= size && size < cache.most)) {
    more = std::min(cache.step, cache.most - cache.tokens);
    if (more <= 0 || cache.tokens > size) {
      return std::nullopt;
    }
    index = cache.tokens;
  }
  const int dropped = std::max(size + more - cache.most, 0);
  std::optional<Arrays> made;
  if (more > 0 || dropped > 0) {
    if (more > 0 && dropped > 0) {
      return std::nullopt;  // which no cache comes to
    }
    const Runs runs = dropped > 0 ? Runs{{0, cache.kept}, {dropped + cache.kept, size}} : Runs{{0, size}};
    made = made_of_runs(cache, runs, new_keys, new_values, more);
    if (!made) {
      return std::nullopt;
    }
    size += more - dropped;
    index = dropped > 0 ? cache.most : index;
  }
  const bool rotates = index == cache.most;
  index = rotates ? cache.kept : index;
  return Place{std::move(made), index, std::min(cache.tokens + 1, size), dropped, cache.is_rotated || rotates};
}

// mlx-lm's _update_concat of several: the tokens in their order, but for the oldest, and the new ones behind them.
// While all fit into the window, buffers have the room that appends of one token leave, and take these in place. Beyond
// it attention sees more tokens than the window has places, in their order: that needs new buffers.
std::optional<Place> place_of_tokens(const Rotating& cache, const mx::array& new_keys, const mx::array& new_values) {
  const int tokens = new_keys.shape(tokens_axis), end = cache.tokens + tokens;
  const bool fits = !cache.is_rotated && cache.index == cache.tokens && end <= cache.most;
  if (fits && end <= cache.size()) {
    return Place{std::nullopt, cache.index, end, 0, false};
  }
  Runs runs;
  int before = 0, dropped = 0;
  if (!cache.held.empty()) {
    const int size = cache.size();
    if (cache.is_rotated) {
      runs = {{0, cache.kept}, {cache.index, size}, {cache.kept, cache.index}};
    } else {
      runs = {{0, cache.index}};
    }
    for (const auto& [first, end] : runs) {
      before += std::max(end - first, 0);
    }
    dropped = std::max(before - cache.most + 1, 0);
    // Behind the tokens that it always keeps.
    int kept = cache.kept, gone = dropped;
    Runs rest;
    for (auto [first, end] : runs) {
      const int stays = std::min(kept, end - first);
      if (stays > 0) {
        rest.emplace_back(first, first + stays);
        first += stays;
        kept -= stays;
      }
      const int goes = kept > 0 ? 0 : std::min(gone, end - first);
      gone -= goes;
      rest.emplace_back(first + goes, end);
    }
    runs = std::move(rest);
    before -= dropped;
  }
  const int step = std::max(cache.step, 1);
  const int more = fits ? std::min((tokens + step - 1) / step * step, cache.most - before) : tokens;
  auto made = made_of_runs(cache, runs, new_keys, new_values, more);
  if (!made) {
    return std::nullopt;
  }
  return Place{std::move(made), before, before + tokens, dropped, false};
}

// Whether a full window of this class keeps its tokens in their order, as a prompt leaves them: exact attention adds
// them up in the order that they have, which in a rotated window depends on the batch. The masks are of that order
// then.
bool keeps_order(nb::handle cache) {
  static PyObject* const mask = name("make_mask");
  static PyObject* const update = name("update_and_fetch");
  return is_exact() && is_patched(attribute(cache.type(), mask)) && is_patched(attribute(cache.type(), update));
}

std::optional<Place> place_of(nb::handle cache, const Rotating& found, const mx::array& new_keys,
                              const mx::array& new_values) {
  if (!are_heads(new_keys, new_values)) {
    return std::nullopt;
  }
  const bool is_full = found.is_rotated || found.index >= found.most;
  const bool in_place = new_keys.shape(tokens_axis) == 1 && !(is_full && keeps_order(cache));
  return in_place ? place_of_token(found, new_keys, new_values) : place_of_tokens(found, new_keys, new_values);
}

// turned: whether keys are appended as they are, where no append turns them.
std::optional<Seen> put_into_place(nb::handle cache, const Place& place, const Arrays& held, const mx::array& new_keys,
                                   const mx::array& new_values, bool turned) {
  if (place.made) {
    auto seen = put_into_new(cache, *place.made, held, new_keys, new_values, place.first, place.end);
    if (seen || !turned) {
      return seen;
    }
    const mx::array* const fresh[] = {&new_keys, &new_values};
    Arrays whole;
    for (int i : {0, 1}) {
      whole.push_back(appended((*place.made)[i], *fresh[i], place.first));
      nb::setattr(cache, nb::handle(buffer_names()[i]), nb::cast(whole[i]));
    }
    return Seen{tokens_until(whole[0], place.end), tokens_until(whole[1], place.end)};
  }
  const nb::object keys = attribute(cache, buffer_names()[0]), values = attribute(cache, buffer_names()[1]);
  return put_into_cache(*as_array(keys), *as_array(values), new_keys, new_values, place.first, place.end);
}

// mlx-lm's RotatingKVCache.update_and_fetch, but where the buffers grow or shrink and no append is in them.
std::optional<Seen> try_rotating_update_and_fetch(const nb::object& cache, const mx::array& new_keys,
                                                  const mx::array& new_values, bool turned) {
  static PyObject* const kind = name("RotatingKVCache");
  static PyObject* const index_name = name("_idx");
  static PyObject* const kept_name = name("keep");
  const auto held = is_cache(cache, kind) ? held_by(cache) : std::nullopt;
  auto found = held ? rotating(cache, *held, attribute<int>(cache, offset_name()), kept_name) : std::nullopt;
  if (!found) {
    return std::nullopt;
  }
  found->is_rotated = found->index != found->size() && found->index < found->tokens;
  const auto place = place_of(cache, *found, new_keys, new_values);
  auto seen = place ? put_into_place(cache, *place, *held, new_keys, new_values, turned) : std::nullopt;
  if (seen) {
    const int tokens = new_keys.shape(tokens_axis);
    nb::setattr(cache, nb::handle(offset_name()), nb::int_(found->tokens + tokens));
    nb::setattr(cache, nb::handle(index_name), nb::int_(place->first + tokens));
  }
  return seen;
}

// The same of mlx-lm's BatchRotatingKVCache, but for prompts that end at several places.
std::optional<Seen> try_batch_rotating_update_and_fetch(const nb::object& cache, const mx::array& new_keys,
                                                        const mx::array& new_values, bool turned) {
  static PyObject* const kind = name("BatchRotatingKVCache");
  static PyObject* const index_name = name("_idx");
  static PyObject* const count_name = name("_offset");
  static PyObject* const rotated_name = name("rotated");
  static PyObject* const lengths_name = name("_lengths");
  static PyObject* const padding_name = name("left_padding");
  if (!is_cache(cache, kind) || !attribute(cache, lengths_name).is_none()) {
    return std::nullopt;
  }
  const nb::object offsets = attribute(cache, offset_name()), padding = attribute(cache, padding_name);
  const auto held = as_array(offsets) && as_array(padding) ? held_by(cache) : std::nullopt;
  auto found = held ? rotating(cache, *held, attribute<int>(cache, count_name), nullptr) : std::nullopt;
  if (!found) {
    return std::nullopt;
  }
  found->is_rotated = attribute<bool>(cache, rotated_name);
  const auto place = place_of(cache, *found, new_keys, new_values);
  auto seen = place ? put_into_place(cache, *place, *held, new_keys, new_values, turned) : std::nullopt;
  if (!seen) {
    return std::nullopt;
  }
  const int tokens = new_keys.shape(tokens_axis);
  const mx::array positions = mx::add(*as_array(offsets), mx::array(tokens, as_array(offsets)->dtype()));
  if (const int less = place->dropped + (place->is_rotated ? tokens : 0)) {
    mx::array& paddings = *as_array(padding);
    paddings.overwrite_descriptor(mx::subtract(paddings, mx::array(less, paddings.dtype())));
  }
  nb::setattr(cache, nb::handle(offset_name()), nb::cast(positions));
  nb::setattr(cache, nb::handle(count_name), nb::int_(found->tokens + tokens));
  nb::setattr(cache, nb::handle(index_name), nb::int_(place->first + tokens));
  nb::setattr(cache, nb::handle(rotated_name), nb::bool_(place->is_rotated));
  // The count of positions is computed at every step, even if no mask of the model reads it.
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
auto with_keys_alike(const nb::object& cache, mx::array& new_keys, mx::array& new_values) {
  auto seen = try_update(cache, new_keys, new_values);
  if (is_exact() && is_nothing(seen)) {
    turn_as_append_does(new_keys, new_values);
  }
  return seen;
}

// The same of windows: a full one keeps the order of its tokens by itself.
template <auto try_update>
std::optional<Seen> windows_with_keys_alike(const nb::object& cache, mx::array& new_keys, mx::array& new_values) {
  auto seen = try_update(cache, new_keys, new_values, false);
  if (is_exact() && !seen) {
    turn_as_append_does(new_keys, new_values);
    seen = try_update(cache, new_keys, new_values, true);
  }
  return seen;
}

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
  module.def("try_update_and_fetch", &with_keys_alike<try_update_and_fetch>, "cache"_a, "keys"_a, "values"_a);
  module.def("try_chunked_update_and_fetch", &with_keys_alike<try_chunked_update_and_fetch>, "cache"_a, "keys"_a,
             "values"_a);
  module.def("try_batch_update_and_fetch", &with_keys_alike<try_batch_update_and_fetch>, "cache"_a, "keys"_a,
             "values"_a);
  module.def("try_rotating_update_and_fetch", &windows_with_keys_alike<try_rotating_update_and_fetch>, "cache"_a,
             "keys"_a, "values"_a);
  module.def("try_batch_rotating_update_and_fetch", &windows_with_keys_alike<try_batch_rotating_update_and_fetch>,
             "cache"_a, "keys"_a, "values"_a);
  module.def("keeps_order", &keeps_order, "cache"_a, "Whether a full window's tokens stay in their order.");
  module.def("try_quantized_update_and_fetch", &with_keys_alike<try_quantized_update_and_fetch>, "cache"_a, "keys"_a,
             "values"_a);
  module.def("try_append_packed", &with_keys_alike<try_append_packed>, "cache"_a, "keys"_a, "values"_a);
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
