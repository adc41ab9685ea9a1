// The options of a call of sample, and the call by mx operations.
#pragma once

#include <optional>

#include "ops/sampling/adjustment.h"

namespace mittens {

struct SampleOptions {
  float inverse_temperature;
  int top_k;  // 0 keeps all
  double top_p;  // 0 keeps all
  double min_p;  // 0 keeps all
  bool greedy;
  int logprobs;  // kNoLogprobs, of the tokens, or of all logits
  bool splits_key;  // whether numbers are drawn by the second half of the key's split
  AdjustOptions adjust;

  bool operator==(const SampleOptions&) const = default;

  bool has_filters() const {
    return !greedy && (top_k > 0 || top_p > 0 || min_p > 0);
  }
};

// Tokens, and the logarithmic probabilities that are asked for. The logits are adjusted already.
Arrays compose_sample(const mx::array& logits, const std::optional<mx::array>& key, const SampleOptions& options,
                      mx::Stream s);

}  // namespace mittens
