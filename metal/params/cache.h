// Parameters of the kernels for key-value caches. Compiled by C++ and by Metal.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mittens {

struct RopeAppendParams {
  int64_t query_strides[3];  // of the new tokens' queries, in elements: batch, head, token
  int64_t key_strides[3];
  int64_t value_strides[3];
  int64_t shared_key_strides[2];  // of turned columns of keys that all heads share: batch, token
  uint32_t query_heads;
  uint32_t key_heads;  // and as many heads of values
  uint32_t tokens;
  uint32_t width;         // of a head
  uint32_t value_width;   // of a head of values
  uint32_t begin;         // the first column that is rotated; from 1 on heads share the keys' columns from there
  uint32_t pairs;         // of a head's elements that are rotated: 2 * pairs of them from there
  uint32_t key_capacity;  // tokens that the buffers have room for
  uint32_t value_capacity;
  uint32_t first;  // where the first token's key and value go
  int32_t offset;  // the first token's position
  float scale;     // of positions
  float log2_base;
  float eps;
  float weight_offset;  // added to the norms' weights
  float query_scale;    // of turned queries
  float value_scale;    // of normed values
  uint32_t has_freqs;
  uint32_t has_offsets;  // a position for each row of the batch
  uint32_t traditional;  // pairs are neighbours
  uint32_t has_value_norm;
};

struct QuantizedRopeAppendParams {
  RopeAppendParams rope;
  uint32_t group_size;  // 32, 64 or 128
  uint32_t bits;        // 2, 3, 4, 5, 6 or 8
};

// Strides of a row, in elements of its array: of new tokens batch, head and token; of a pool block, head and key.
struct RowStrides {
  int64_t at[3];
};

struct PagedAppendParams {
  RowStrides new_keys;
  RowStrides new_values;
  RowStrides keys;  // of the pool; words of a packed one
  RowStrides values;
  uint32_t key_heads;
  uint32_t tokens;  // of a row of the batch
  uint32_t width;
  uint32_t value_width;
  uint32_t blocks;         // of the pool
  uint32_t block_shift;    // a block is 1 << block_shift keys
  uint32_t table_entries;  // of a row of the table
  uint32_t table_row;      // stride of the table's rows
};

struct QuantizedPagedAppendParams {
  PagedAppendParams append;
  RowStrides key_scales;
  RowStrides key_biases;
  RowStrides value_scales;
  RowStrides value_biases;
  uint32_t group_size;  // 32, 64 or 128
  uint32_t bits;        // 2, 3, 4, 5, 6 or 8
};

}  // namespace mittens
