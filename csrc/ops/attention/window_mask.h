// Masks of a causal window that attention knows by the array: it takes the window in their place, and nobody computes
// them.
#pragma once

#include <optional>

#include "mlx/array.h"

namespace mittens {

namespace mx = mlx::core;

// Of bool [queries, offset + queries]: query i sees the last `window` keys up to key offset + i. Lazy.
mx::array window_mask(int queries, int offset, int window);

// The window of a mask that window_mask gave this thread, one of its last few; none of another array.
std::optional<int> window_of(const mx::array& mask);

}  // namespace mittens
