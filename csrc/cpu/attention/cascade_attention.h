// Attention of rows that share their first keys: one call over these, one over each row's own, and their results
// merged.
#pragma once

#include "cpu/attention/ragged_attention.h"

namespace mittens::cpu {

// Results over parts of the keys, and the logsumexp of each row.
struct AttentionMerge {
  Type type;
  size_t batch;
  size_t heads;
  size_t queries;
  size_t width;
  const void* prefix;  // [heads, batch, queries, width]
  const float* prefix_logsumexp;  // [heads, batch, queries]
  const void* own;  // [batch, heads, queries, width], may be y
  const float* own_logsumexp;  // [batch, heads, queries]
  void* y;  // [batch, heads, queries, width]
};

// Weighs results by the exponentials of their logsumexps. A row that sees no key of either is 0.
void attention_merge(const AttentionMerge& call);

// prefix: queries [1, heads, batch * queries, width], without y and logsumexp. own: without logsumexp. keys: of own,
// none where every row has all.
void cascade_attention(const Attention& prefix, const Attention& own, const RaggedKeys& keys);

}  // namespace mittens::cpu
