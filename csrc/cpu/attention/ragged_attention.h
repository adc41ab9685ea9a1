// Attention whose rows of the batch have keys of their own: each is a call of its own, over its keys alone.
#pragma once

#include "cpu/attention/attention.h"

namespace mittens::cpu {

// The range of keys of each row of the batch. A row with a range outside of the keys is NaN, and so is a query that
// sees a key in a block that its pool does not have. Rows of blocks have no starts.
struct RaggedKeys {
  const int32_t* starts;  // [batch], or [batch, queries]; nullptr: 0
  bool has_query_starts;
  const int32_t* ends;  // [batch]; nullptr: the number of keys
};

// Attention of one call in the code for this machine, in attention.cpp; the caller gives memory back.
void (*attention_here())(const Attention& call);

void ragged_attention(const Attention& call, const RaggedKeys& keys);

}  // namespace mittens::cpu
