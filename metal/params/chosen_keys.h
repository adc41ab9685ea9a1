// Parameters of the kernels that choose keys for a query. Compiled by C++ and by Metal.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mittens {

// Simdgroups of a threadgroup. In index_scores they share queries, in take_tokens nothing.
enum { kChosenKeysSimdgroups = 4 };

// Strides are in elements of their array.
struct IndexScoresParams {
  int64_t query_strides[3];   // batch, head, query
  int64_t key_strides[2];     // batch, key
  int64_t weight_strides[2];  // batch, query
  uint32_t heads;
  uint32_t queries;
  uint32_t keys;
  float scale;
};

struct TakeTokensParams {
  int64_t key_strides[3];  // batch, head, token
  int64_t value_strides[3];
  int64_t index_strides[2];  // batch, head: 0 where all heads have the same
  uint32_t tokens;
  uint32_t width;  // of a head
  uint32_t value_width;
  uint32_t count;      // of indices
  uint32_t is_signed;  // negative indices count from the end
  uint32_t has_packs;  // rows are whole loads of 16 bytes
};

}  // namespace mittens
