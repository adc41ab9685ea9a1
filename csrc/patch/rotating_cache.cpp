// mlx-lm's update_and_fetch of windows: RotatingKVCache and BatchRotatingKVCache.
#include <algorithm>
#include <optional>
#include <utility>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "mlx/ops.h"
#include "patch/cache_buffers.h"
#include "patch/deferred_rope.h"
#include "patch/function_wrapper.h"
#include "python/registry.h"
#include "runtime/numerics.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace mittens {

namespace {

using namespace cache_buffers;

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
      return std::nullopt;  // no cache grows and drops tokens in one step
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

// turned: new_keys have their rotary embedding. If no append is pending that would turn them, they are appended as they
// are.
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

// An update_and_fetch whose keys are turned alike where the cache itself is to append them: a token's keys and queries
// then have the same bits in every call. A full window keeps the order of its tokens by itself.
template <auto try_update>
std::optional<Seen> windows_with_keys_alike(const nb::object& cache, mx::array& new_keys, mx::array& new_values) {
  auto seen = try_update(cache, new_keys, new_values, false);
  if (is_exact() && !seen) {
    turn_as_append_does(new_keys, new_values);
    seen = try_update(cache, new_keys, new_values, true);
  }
  return seen;
}

void bind(nb::module_& module) {
  module.def("try_rotating_update_and_fetch", &windows_with_keys_alike<try_rotating_update_and_fetch>, "cache"_a,
             "keys"_a, "values"_a);
  module.def("try_batch_rotating_update_and_fetch", &windows_with_keys_alike<try_batch_rotating_update_and_fetch>,
             "cache"_a, "keys"_a, "values"_a);
  module.def("keeps_order", &keeps_order, "cache"_a, "Whether a full window's tokens stay in their order.");
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
