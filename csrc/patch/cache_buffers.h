// The buffers of a layer's key/value cache: where tokens go in them, and how they grow as mlx-lm's do.
#pragma once

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>

#include "mlx/array.h"
#include "ops/cache/cache_step.h"
#include "patch/nn_module.h"
#include "python/array_caster.h"

namespace mittens::cache_buffers {

namespace nb = nanobind;

PyObject* offset_name();

// Names of a cache's attributes.
PyObject* const* buffer_names();

// Whether a cache is of mlx-lm's class of this name; a subclass is not.
bool is_cache(nb::handle cache, PyObject* kind);

bool are_heads(const mx::array& new_keys, const mx::array& new_values);

// A buffer's tokens up to `end`.
mx::array tokens_until(const mx::array& buffer, int end);

// The buffer with the fresh tokens from `first` on.
mx::array appended(const mx::array& buffer, const mx::array& fresh, int first);

// Assigns to the buffers in place, as mx's own assignment to a part of an array: other holders of the Python objects
// see it too.
void replace(mx::array& keys, mx::array& values, const CacheStep& step);

using Seen = std::pair<mx::array, mx::array>;

// Puts new tokens into the buffers from `first` on; returns their tokens up to `end`, nullopt if there is no room.
std::optional<Seen> put_into_cache(mx::array& keys, mx::array& values, const mx::array& new_keys,
                                   const mx::array& new_values, int first, int end);

// Puts new tokens from `first` on into buffers made for them, and these into the cache; returns their tokens up to
// `end`. nullopt where no append turns the keys: then the cache is as it was.
std::optional<Seen> put_into_new(nb::handle cache, const Arrays& buffers, const Arrays& held, const mx::array& new_keys,
                                 const mx::array& new_values, int first, int end);

// Keys and values that a cache holds: no arrays where it is empty, nothing where it holds something else.
std::optional<Arrays> held_by(nb::handle cache);

// Words, scales and biases of a quantized cache's keys or values, as mlx-lm holds them; none where there are no such.
using Held = std::array<mx::array*, 3>;

std::optional<Held> held_triple(nb::handle triple);

// The shape and type of one head's token in a buffer.
struct Item {
  int columns;
  mx::Dtype dtype;
};

// A part of a buffer for a number of tokens, of heads like the fresh ones. Tokens that no append writes are zeros.
mx::array room_for(const mx::array& fresh, int tokens, const Item& item, bool is_all_written);

// Whether a buffer has heads like the fresh ones, of such items: the parts of a grown buffer fit then.
bool holds(const mx::array& buffer, const mx::array& fresh, const Item& item);

// Runs of a buffer's tokens, one behind the other: [first, end) each.
using Runs = std::vector<std::pair<int, int>>;

// A buffer of these tokens, with room for more.
mx::array with_room(const mx::array& buffer, const Runs& runs, const mx::array& fresh, int more, const Item& item);

// The buffers of a cache that grows by whole steps, or is made, for tokens from `first` on, as mlx-lm's do. A fresh
// array and an item for each; none where they do not fit.
std::optional<Arrays> grown_by_steps(nb::handle cache, const Arrays& held, const Arrays& fresh,
                                     const std::vector<Item>& items, int first);

}  // namespace mittens::cache_buffers
