// Penalties of logits that are not computed yet: a draw of tokens adds them in its own launches.
#pragma once

#include "ops/sampling/sample_primitive.h"

namespace mittens {

// The penalties of a call, or of rows with penalties of their own, which mlx-lm's batches put together again; none
// where the logits have none.
std::optional<Penalized> pending_penalties(const mx::array& logits);

}  // namespace mittens
