// Keys and values of tokens, as arguments of ops on caches.
#pragma once

#include <utility>

#include "mlx/array.h"
#include "runtime/checks.h"

namespace mittens {

// keys and values [batch, heads, tokens, ..].
inline void check_token_rows(const char* op, const mx::array& keys, const mx::array& values) {
  for (const auto& [name, rows] : {std::pair("keys", &keys), std::pair("values", &values)}) {
    if (rows->ndim() != 4) {
      checks::fail(op, name, " has shape ", rows->shape(), ": expected four dimensions");
    }
  }
  for (int axis = 0; axis < 3; ++axis) {
    if (keys.shape(axis) != values.shape(axis)) {
      checks::fail(op, "keys has shape ", keys.shape(), ", values ", values.shape(),
                   ": expected the same batch, heads and tokens");
    }
  }
}

}  // namespace mittens
