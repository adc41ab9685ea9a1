// Compiled by C++ and by Metal.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mittens {

enum { kBackwardSimdgroups = 4 };  // of a threadgroup

enum BackwardMask : uint32_t { no_backward_mask, bool_backward_mask, additive_backward_mask };

// Rows of a head that start on multiples of 16 bytes; strides are in elements, the last is 1.
struct BackwardView {
  int64_t start;  // of the first element, from the start of what is bound
  int64_t batch;
  int64_t head;
  int32_t row;    // a row's first element is less than 2^31 from its head's
};

struct AttentionBackwardParams {
  BackwardView queries;
  BackwardView keys;
  BackwardView values;
  BackwardView y;
  BackwardView dy;
  BackwardView finite_queries;  // with 0 for what is not finite, where a row may not see some key
  BackwardView finite_keys;
  int64_t mask_start;
  int64_t mask_strides[2];  // batch, head; 0 where it is broadcast
  int64_t mask_row_bytes;   // from row to row
  int32_t mask_key;         // from key to key
  uint32_t mask_sizes[4];   // as it was given; 1 where it is broadcast
  uint32_t mask;            // BackwardMask
  uint32_t batches;
  uint32_t heads;           // of the queries
  uint32_t key_heads;
  uint32_t ratio;           // heads / key_heads
  uint32_t rows;            // queries of a head
  uint32_t columns;         // keys of a head
  uint32_t width;           // of a head
  int32_t seen_begin;       // row i sees keys from i + seen_begin to i + seen_end, by causality and window
  int32_t seen_end;
  uint32_t has_sinks;
  float scale;
};

}  // namespace mittens
