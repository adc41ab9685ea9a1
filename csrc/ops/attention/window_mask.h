// Masks that attention knows by the array: it takes what they are made of in their place, and nobody computes them.
#pragma once

#include <optional>

#include "mlx/array.h"

namespace mittens {

namespace mx = mlx::core;

// Of bool [queries, offset + queries]: query i sees the last `window` keys up to key offset + i. Lazy.
mx::array window_mask(int queries, int offset, int window);

// Of bool [batch, 1, queries, offset + queries]: query i sees the keys from its row's start on up to key offset + i,
// with a window the last of these. Starts [batch] of int32 may lie outside of the keys. Lazy.
mx::array row_mask(int queries, int offset, std::optional<int> window, const mx::array& starts);

// What a mask is made of.
struct KnownMask {
  mx::array mask;
  int window;  // 0: all keys up to the query's
  std::optional<mx::array> starts;  // of keys, or behind the last
};

// That of a mask that one of the functions above gave this thread, one of its last few; none of another array.
std::optional<KnownMask> known_mask(const mx::array& mask);

}  // namespace mittens
