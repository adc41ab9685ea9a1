// Compiled by C++ and by Metal.
#pragma once

#include "params/attention.h"

namespace mittens {

enum {
  kBackwardSimdgroups = 4,  // of a threadgroup
  kMaskBlocks = 4,          // of keys, that a simdgroup takes for the gradient of a mask
};

// Rows start on multiples of 16 bytes, and less than 2^31 elements from the first of their head.
struct AttentionBackwardParams {
  TokenRows queries;
  TokenRows keys;
  TokenRows values;
  TokenRows y;
  TokenRows dy;
  TokenRows finite_queries;  // with 0 for infinity and NaN, where a row may not see some key
  TokenRows finite_keys;
  int64_t mask_start;
  int64_t mask_strides[2];  // batch, head; 0 where it is broadcast
  int64_t mask_row_bytes;   // from row to row
  int32_t mask_key;         // from key to key
  uint32_t mask_sizes[4];   // as it was given; 1 where it is broadcast
  uint32_t mask;            // AttentionMask
  uint32_t batches;
  uint32_t heads;  // of the queries
  uint32_t key_heads;
  uint32_t ratio;      // heads / key_heads
  uint32_t rows;       // queries of a head
  uint32_t columns;    // keys of a head
  uint32_t width;      // of a head
  int32_t seen_begin;  // row i sees keys from i + seen_begin to i + seen_end, by causality and window
  int32_t seen_end;
  uint32_t has_sinks;
  float scale;
};

}  // namespace mittens
