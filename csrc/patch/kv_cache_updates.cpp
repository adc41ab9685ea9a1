// mlx-lm's update_and_fetch of caches that grow: KVCache, ChunkedKVCache, BatchKVCache, and packed ones.
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "mlx/ops.h"
#include "patch/cache_buffers.h"
#include "patch/deferred_rope.h"
#include "python/registry.h"
#include "runtime/numerics.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace mittens {

namespace {

using namespace cache_buffers;

std::optional<Seen> append_to_cache(mx::array& keys, mx::array& values, const mx::array& new_keys,
                                    const mx::array& new_values, int first) {
  const int tokens = new_keys.ndim() == 4 ? new_keys.shape(tokens_axis) : 0;
  return put_into_cache(keys, values, new_keys, new_values, first, first + tokens);
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

// The append to a cache whose offset counts tokens; its buffers begin with token `start`.
std::optional<Seen> append_at_offset(nb::handle cache, const mx::array& new_keys, const mx::array& new_values,
                                     int start) {
  const int offset = attribute<int>(cache, offset_name());
  auto seen = append_or_grow(cache, new_keys, new_values, offset - start);
  if (seen) {
    nb::setattr(cache, nb::handle(offset_name()), nb::int_(offset + new_keys.shape(tokens_axis)));
  }
  return seen;
}

// mlx-lm's KVCache.update_and_fetch, but where the cache is of another class, or has no room and no append makes it.
std::optional<Seen> try_update_and_fetch(const nb::object& cache, const mx::array& new_keys,
                                         const mx::array& new_values) {
  static PyObject* const kind = name("KVCache");
  return is_cache(cache, kind) ? append_at_offset(cache, new_keys, new_values, 0) : std::nullopt;
}

// The same of mlx-lm's ChunkedKVCache.
std::optional<Seen> try_chunked_update_and_fetch(const nb::object& cache, const mx::array& new_keys,
                                                 const mx::array& new_values) {
  static PyObject* const kind = name("ChunkedKVCache");
  static PyObject* const start = name("start_position");
  return is_cache(cache, kind) ? append_at_offset(cache, new_keys, new_values, attribute<int>(cache, start))
                               : std::nullopt;
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

void bind(nb::module_& module) {
  module.def("try_update_and_fetch", &with_keys_alike<try_update_and_fetch>, "cache"_a, "keys"_a, "values"_a);
  module.def("try_chunked_update_and_fetch", &with_keys_alike<try_chunked_update_and_fetch>, "cache"_a, "keys"_a,
             "values"_a);
  module.def("try_batch_update_and_fetch", &with_keys_alike<try_batch_update_and_fetch>, "cache"_a, "keys"_a,
             "values"_a);
  module.def("try_quantized_update_and_fetch", &with_keys_alike<try_quantized_update_and_fetch>, "cache"_a, "keys"_a,
             "values"_a);
  module.def("try_append_packed", &with_keys_alike<try_append_packed>, "cache"_a, "keys"_a, "values"_a);
  module.def(
      "append_to_cache", &append_to_cache, "keys"_a, "values"_a, "new_keys"_a, "new_values"_a, "first"_a,
      "Puts new tokens into the buffers of keys and values from `first` on. Both up to the last of them; none if "
      "there is no room.");
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
