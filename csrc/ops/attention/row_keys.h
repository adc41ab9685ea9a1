// Rows of a batch that have keys of their own, from a start to an end: the arguments, and the same as a mask where no
// kernel takes them.
#pragma once

#include <optional>

#include "ops/attention/attention.h"
#include "ops/attention/attention_composed.h"

namespace mittens {

// Checks and takes in starts and ends.
void take_row_keys(const char* op, AttentionCall& call, const std::optional<mx::array>& starts,
                   const std::optional<mx::array>& ends, mx::Stream stream);

// The call with a mask in the place of starts, ends, causality and window.
AttentionCall with_mask_of_rows(const AttentionCall& call, mx::Stream stream);
DenseAttention with_mask_of_rows(const DenseAttention& call, const std::optional<mx::array>& starts,
                                 const std::optional<mx::array>& ends, mx::Stream stream);

// Which keys causality, window, starts and ends leave to each query, [batch, 1, queries, keys].
mx::array seen_by_rows(const AttentionOptions& options, const std::optional<mx::array>& starts,
                       const std::optional<mx::array>& ends, int queries, int keys, mx::Stream stream);

// A mask that shows no more than the keys seen: of bool, or with -inf for the others where it has numbers.
mx::array with_seen(const std::optional<mx::array>& mask, const mx::array& seen, mx::Stream stream);

// Results [batch, heads, queries, ..] with NaN for queries whose start or end is no key.
mx::array or_nan(const mx::array& results, const std::optional<mx::array>& starts, const std::optional<mx::array>& ends,
                 int keys, mx::Stream stream);

}  // namespace mittens
