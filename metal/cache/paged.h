// Where a new token's keys and values go in a pool of blocks, by a table.
#pragma once

#include <metal_stdlib>

#include "params/cache.h"

using namespace metal;

namespace mittens {

// A key of a pool, or none: where the token is before the first key, beyond the table, or in a block that the pool has
// not.
struct PoolKey {
  uint block;
  uint within;
  bool is_there;
};

inline PoolKey key_of_token(
    int position, uint token, const device int* table, uint batch, constant PagedAppendParams& params) {
  const long at = long(position) + long(token);
  const uint entry = at >= 0 ? uint(at >> params.block_shift) : params.table_entries;
  if (entry >= params.table_entries) {
    return PoolKey{0, 0, false};
  }
  const uint block = uint(table[size_t(batch) * params.table_row + entry]);
  return PoolKey{block, uint(at) & ((1u << params.block_shift) - 1), block < params.blocks};
}

inline int64_t place_of(PoolKey key, uint head, constant RowStrides& strides) {
  return key.block * strides.at[0] + head * strides.at[1] + key.within * strides.at[2];
}

inline int64_t place_of_token(uint batch, uint head, uint token, constant RowStrides& strides) {
  return batch * strides.at[0] + head * strides.at[1] + token * strides.at[2];
}

}  // namespace mittens
