// The states or weights of a convolution of queries, keys and values: of all channels, or of each.
#pragma once

#include <string>
#include <tuple>
#include <variant>

#include "runtime/primitive.h"

namespace mittens {

using Convolved = std::variant<mx::array, std::tuple<mx::array, mx::array, mx::array>>;

// One, or three.
inline Arrays arrays_of(const Convolved& convolved) {
  if (const auto* all = std::get_if<mx::array>(&convolved)) {
    return {*all};
  }
  const auto& [q, k, v] = std::get<1>(convolved);
  return {q, k, v};
}

inline Convolved convolved_of(const Arrays& arrays) {
  if (arrays.size() == 1) {
    return arrays[0];
  }
  return std::make_tuple(arrays[0], arrays[1], arrays[2]);
}

inline std::string name_of_part(const char* name, size_t i, size_t count) {
  return count == 1 ? name : std::string(name) + "[" + std::to_string(i) + "]";
}

}  // namespace mittens
