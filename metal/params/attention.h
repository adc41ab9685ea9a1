// Compiled by C++ and by Metal.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mittens {

enum { kDecodeSimdgroups = 4, kPrefillSimdgroups = 4 };  // of a threadgroup

// How the scores of a row of queries are changed before their softmax.
enum AttentionMask : uint32_t { no_mask, bool_mask, additive_mask };

// Strides are in elements of their array, of packed ones in words; the last stride of queries, keys and values is 1.
struct AttentionParams {
  int64_t query_start;  // of the first element, from the start of what is bound: strides may be negative
  int64_t key_start;
  int64_t value_start;
  int64_t mask_start;
  int64_t key_scales_start;
  int64_t key_biases_start;
  int64_t value_scales_start;
  int64_t value_biases_start;
  int64_t query_strides[3];  // batch, head, token
  int64_t key_strides[2];    // batch, head
  int64_t value_strides[2];
  int64_t mask_strides[4];   // batch, head, query, key; 0 where it is broadcast
  int64_t key_scales_strides[2];  // of packed keys and values
  int64_t key_biases_strides[2];
  int64_t value_scales_strides[2];
  int64_t value_biases_strides[2];
  int32_t key_stride;  // from token to token
  int32_t value_stride;
  int32_t key_scales_stride;
  int32_t key_biases_stride;
  int32_t value_scales_stride;
  int32_t value_biases_stride;
  uint32_t group_shift;  // a group is 1 << group_shift integers
  uint32_t batches;
  uint32_t heads;        // of the queries
  uint32_t key_heads;
  uint32_t ratio;        // heads / key_heads
  uint32_t queries;
  uint32_t keys;
  uint32_t width;        // of a head
  uint32_t first_key;    // that any query sees; those before are not read
  uint32_t causal;       // query i sees keys up to i + keys - queries
  uint32_t window;       // and of those the last so many; 0: all
  uint32_t every_row_sees;  // some key, and causality alone says which: those that no row sees may be left out
  uint32_t skips;        // tiles that no row sees, by looking at each
  uint32_t mask;         // AttentionMask
  uint32_t has_sinks;
  uint32_t aligned;      // keys and values lie in 16-byte packs
  uint32_t queries_aligned;
  uint32_t splits;       // threadgroups that share the keys of a row
  uint32_t keys_per_split;
  float scale;           // the op's; for half types log2(e) times it
};

struct AttentionCombineParams {
  uint32_t rows;  // batch * heads * queries
  uint32_t heads;
  uint32_t queries;
  uint32_t width;
  uint32_t splits;
  uint32_t has_sinks;
};

}  // namespace mittens
