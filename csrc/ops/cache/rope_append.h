// Rotary embedding of new queries and keys, and keys and values into a cache, as other ops call it.
#pragma once

#include <optional>
#include <variant>

#include "mlx/utils.h"
#include "ops/cache/cache_step.h"

namespace mittens {

// How a layer turns its heads.
struct Rotary {
  int dims = 0;  // of a head that are rotated
  std::optional<float> base;
  float scale = 1.0f;  // of positions
  std::optional<mx::array> freqs;
  std::optional<mx::array> query_norm;
  std::optional<mx::array> key_norm;
  float eps = 0.0f;  // of the norms
};

// The position of the first new token: of all rows of the batch, or of each, [batch].
using Offset = std::variant<int, mx::array>;

// Checks a call and takes it in; none where no kernel covers it.
std::optional<Append> rope_append_of(const mx::array& heads, const mx::array& keys, const mx::array& values,
                                     const Rotary& rotary, const Offset& offset, int start, mx::Stream stream);

// The same of new queries, keys and values, each [batch, heads, tokens, width] or [batch, tokens, heads * width]; none
// where they do not fit.
std::optional<Append> rope_append_of(const mx::array& new_queries, const mx::array& new_keys,
                                     const mx::array& new_values, const mx::array& keys, const mx::array& values,
                                     const Rotary& rotary, const Offset& offset, int start, mx::Stream stream);

// Whether an append may be a step that updates its buffers in place. Not under a transformation that looks at its
// inputs, which needs an op with derivatives.
bool may_be_a_step(const Append& append);

// The queries, and the buffers with the new tokens.
CacheStep apply_rope_append(Append append);

}  // namespace mittens
