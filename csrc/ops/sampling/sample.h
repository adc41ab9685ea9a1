// Tokens drawn from logits, for the patch.
#pragma once

#include <utility>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace mittens {

namespace mx = mlx::core;

// By the next key of mx.random's, as mm.sample(logits, ..).
mx::array sample_tokens(const mx::array& logits, double temperature, int top_k, double top_p, double min_p,
                        mx::StreamOrDevice where);

// The same tokens, and logits - logsumexp(logits) along the rows.
std::pair<mx::array, mx::array> sample_with_logprobs(const mx::array& logits, double temperature, int top_k,
                                                     double top_p, double min_p, mx::StreamOrDevice where);

}  // namespace mittens
