// Tokens drawn from logits, for the patch.
#pragma once

#include <optional>
#include <utility>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace mittens {

namespace mx = mlx::core;

// By the next key of mx.random's, as mm.sample(logits, ..).
mx::array sample_tokens(const mx::array& logits, double temperature, int top_k, double top_p, double min_p,
                        mx::StreamOrDevice where);

// Logits [rows, columns] with a penalty for the last tokens, which all rows share; which: 0 repetition, 1 presence, 2
// frequency. Penalties of the same tokens that nobody has asked for yet are part of it, where they come before in that
// order. None where no kernel covers the call.
std::optional<mx::array> penalized_logits(const mx::array& logits, const mx::array& tokens, int which, double penalty,
                                          int context);

// The same tokens, and logits - logsumexp(logits) along the rows. Logits that have penalties which nobody has asked for
// yet get them in the same launches.
std::pair<mx::array, mx::array> sample_with_logprobs(const mx::array& logits, double temperature, int top_k,
                                                     double top_p, double min_p, mx::StreamOrDevice where);

}  // namespace mittens
