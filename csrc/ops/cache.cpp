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

// The buffer with the fresh tokens from `first` on, and its tokens up to their end.
std::pair<mx::array, mx::array> appended(const mx::array& buffer, const mx::array& fresh, int first) {
  mx::Shape start(4, 0);
  mx::Shape stop = buffer.shape();
  start[tokens_axis] = first;
  stop[tokens_axis] = first + fresh.shape(tokens_axis);
  mx::array whole = mx::slice_update(buffer, fresh, start, stop);
  mx::array seen = mx::slice(whole, mx::Shape(4, 0), stop);
  return {whole, seen};
}

using Appended = std::tuple<mx::array, mx::array, mx::array, mx::array>;

std::optional<Appended> append_to_cache(const mx::array& keys, const mx::array& values, const mx::array& new_keys,
                                        const mx::array& new_values, int first) {
  if (!has_room(keys, new_keys, first) || !has_room(values, new_values, first)) {
    return std::nullopt;
  }
  const auto [all_keys, seen_keys] = appended(keys, new_keys, first);
  const auto [all_values, seen_values] = appended(values, new_values, first);
  return Appended{all_keys, all_values, seen_keys, seen_values};
}

using Attended = std::tuple<mx::array, mx::array, mx::array>;

// A token's attention after its keys and values were appended; `turned` holds its queries and, behind them, its keys.
std::optional<Attended> attend_with_cache(const mx::array& turned, const mx::array& new_values, const mx::array& keys,
                                          const mx::array& values, int first, float scale) {
  if (turned.ndim() != 4 || turned.shape(2) != 1 || keys.ndim() != 4 || turned.shape(1) <= keys.shape(1)) {
    return std::nullopt;
  }
  const Arrays parts = mx::split(turned, mx::Shape{turned.shape(1) - keys.shape(1)}, 1);
  const auto cache = append_to_cache(keys, values, parts[1], new_values, first);
  if (!cache) {
    return std::nullopt;
  }
  const auto& [all_keys, all_values, seen_keys, seen_values] = *cache;
  const auto y = attempt_attention(parts[0], seen_keys, seen_values, scale, {}, std::nullopt, std::nullopt, false, {});
  if (!y) {
    return std::nullopt;
  }
  return Attended{mx::reshape(*y, {y->shape(0), 1, -1}), all_keys, all_values};
}

void bind(nb::module_& module) {
  module.def("append_to_cache", &append_to_cache, "keys"_a, "values"_a, "new_keys"_a, "new_values"_a, "first"_a,
             "The buffers of keys and values with new tokens from `first` on, and both up to the last of them; none "
             "if there is no room.");
  module.def("attend_with_cache", &attend_with_cache, "turned"_a, "new_values"_a, "keys"_a, "values"_a, "first"_a,
             "scale"_a,
             "Attention of one token, [batch, 1, heads * width], and the buffers with its keys and values; none if "
             "there is no room or no kernel covers it.");
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
