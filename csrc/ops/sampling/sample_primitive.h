// The primitive behind sample.
#pragma once

#include <optional>
#include <utility>

#include "ops/sampling/sample_composed.h"

namespace mittens {

inline constexpr int most_sampled_columns = (1 << 20) - 1;  // more exponentials would overflow a sum of 64 bits
// The shape of a row's tokens.
mx::Shape without_columns(const mx::array& logits);

// logits [.., columns], unless greedy key [2], and the arrays of an adjustment -> tokens [..], logarithmic
// probabilities of these or of all logits if they are asked for, a workspace, and for an adjustment the adjusted logits
// and room for counts.
Arrays sample_by_kernels(const Arrays& inputs, const SampleOptions& options, mx::Stream stream);

// Logits, and the penalties that a call of penalized_logits adds to them.
using Penalized = std::pair<mx::array, Adjustment>;

// The call behind adjusted logits that are not computed yet; none behind any other array.
std::optional<Penalized> penalties_of_call(const mx::array& logits);

}  // namespace mittens
