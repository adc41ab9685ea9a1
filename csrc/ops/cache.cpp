// What a layer does with a key/value cache at every token, in one call: indexing four arrays from Python costs the host
// more than the layer's attention.

#include <optional>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include "mlx/ops.h"
#include "ops/attention.h"
#include "ops/registry.h"
#include "ops/rope_append.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr int tokens_axis = 2;  // of [batch, heads, tokens, width]

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

// The buffer with the fresh tokens from `first` on, and its tokens up to their end.
std::pair<mx::array, mx::array> appended(const mx::array& buffer, const mx::array& fresh, int first) {
  mx::Shape start(4, 0);
  mx::Shape stop = buffer.shape();
  start[tokens_axis] = first;
  stop[tokens_axis] = first + fresh.shape(tokens_axis);
  mx::array whole = mx::slice_update(buffer, fresh, start, stop);
  return {whole, tokens_until(whole, stop[tokens_axis])};
}

using Cached = std::tuple<mx::array, mx::array, mx::array, mx::array>;

std::optional<Cached> append_to_cache(const mx::array& keys, const mx::array& values, const mx::array& new_keys,
                                      const mx::array& new_values, int first) {
  if (!has_room(keys, new_keys, first) || !has_room(values, new_values, first)) {
    return std::nullopt;
  }
  const auto [all_keys, seen_keys] = appended(keys, new_keys, first);
  const auto [all_values, seen_values] = appended(values, new_values, first);
  return Cached{all_keys, all_values, seen_keys, seen_values};
}

// The same for a layer's heads of queries, keys and values, of which it turns queries and keys.
std::optional<Appended> turn_and_append(const mx::array& heads, const mx::array& keys, const mx::array& values,
                                        const Rotary& rotary, int first) {
  if (heads.ndim() != 4 || keys.ndim() != 4 || heads.shape(1) <= 2 * keys.shape(1)) {
    return std::nullopt;
  }
  for (const auto* buffer : {&keys, &values}) {
    if (buffer->ndim() != 4 || buffer->dtype() != heads.dtype() ||
        heads.shape(tokens_axis) > buffer->shape(tokens_axis) - first) {
      return std::nullopt;
    }
  }
  return attempt_rope_append(heads, keys, values, rotary, first, first, {});
}

using TurnedAndCached = std::tuple<mx::array, mx::array, mx::array, mx::array, mx::array>;

std::optional<TurnedAndCached> turn_into_cache(const mx::array& heads, const mx::array& keys, const mx::array& values,
                                               const Rotary& rotary, int first) {
  const auto all = turn_and_append(heads, keys, values, rotary, first);
  if (!all) {
    return std::nullopt;
  }
  const int end = first + heads.shape(tokens_axis);
  return TurnedAndCached{all->queries, all->keys, all->values, tokens_until(all->keys, end),
                         tokens_until(all->values, end)};
}

using Attended = std::tuple<mx::array, mx::array, mx::array>;

// A token's attention over a cache, from its heads on.
std::optional<Attended> attend_with_cache(const mx::array& heads, const mx::array& keys, const mx::array& values,
                                          const Rotary& rotary, int first, float scale) {
  if (heads.ndim() != 4 || heads.shape(tokens_axis) != 1) {
    return std::nullopt;
  }
  const auto all = turn_and_append(heads, keys, values, rotary, first);
  if (!all) {
    return std::nullopt;
  }
  const auto [seen_keys, seen_values] = seen_by_kernels(*all, first + 1);
  const auto y =
      attempt_attention(all->queries, seen_keys, seen_values, scale, {}, std::nullopt, std::nullopt, false, {});
  if (!y) {
    return std::nullopt;
  }
  return Attended{mx::reshape(*y, {y->shape(0), 1, -1}), all->keys, all->values};
}

void bind(nb::module_& module) {
  module.def("append_to_cache", &append_to_cache, "keys"_a, "values"_a, "new_keys"_a, "new_values"_a, "first"_a,
             "The buffers of keys and values with new tokens from `first` on, and both up to the last of them; none "
             "if there is no room.");
  module.def("turn_into_cache", &turn_into_cache, "heads"_a, "keys"_a, "values"_a, "rotary"_a, "first"_a,
             "The turned queries of a layer's heads, the buffers with its turned keys and its values from `first` on, "
             "and both up to the last of them; none if there is no room.");
  module.def("attend_with_cache", &attend_with_cache, "heads"_a, "keys"_a, "values"_a, "rotary"_a, "first"_a, "scale"_a,
             "Attention of one token, [batch, 1, heads * width], from a layer's heads of queries, keys and values on, "
             "and the buffers with its keys and values; none if there is no room or no kernel covers it.");
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
