// Masks that attention recognizes by the array: it uses their parameters instead, and the masks are never computed.
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

// A mask and its parameters.
struct KnownMask {
  mx::array mask;
  int window;  // 0: all keys up to the query's
  std::optional<mx::array> starts;  // of keys, or behind the last
};

// The parameters of one of the last few masks that the functions above gave this thread; nullopt for other arrays.
std::optional<KnownMask> known_mask(const mx::array& mask);

}  // namespace mittens
