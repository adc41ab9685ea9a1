// Keys and values in blocks of a pool that all rows of the batch share: a table names the blocks of each row, in the place
// of WholeRows. A simdgroup's step lies within one block, as a block is a multiple of a step.
#pragma once

#include "attention/ragged.h"

namespace mittens {

// The block of some keys.
struct TableBlock {
  uint at;     // index in the pool
  uint first;  // key
  bool is_in_pool;
};

// Reads table entries that are outside of the pool, but not their blocks. An entry is loaded a step before its block.
struct BlockTable {
  static constant constexpr bool may_lack = true;
  const device int* entries;  // of the row
  uint last;                  // entry
  uint blocks;
  uint shift;
  int next;

  void seek(uint key) {
    next = entries[min(key >> shift, last)];
  }

  TableBlock take(uint key, uint step) {
    const TableBlock block = TableBlock{uint(next), key >> shift << shift, uint(next) < blocks};
    seek(key + step);
    return block;
  }
};

inline BlockTable block_table(const device int* table, AttentionPlace place, constant PagedAttentionParams& params) {
  return BlockTable{
      table + size_t(place.batch) * params.table_row, params.table_entries - 1, params.blocks, params.block_shift, 0};
}

// The rows of the first block, and the distance from a block's rows to the next block's.
template <typename Source, typename Stride>
struct PoolRows {
  using Values = typename Source::Values;
  Source rows;
  Stride stride;
};

template <typename Source, typename Stride>
inline PoolRows<Source, Stride> pool_rows(Source rows, Stride stride) {
  return PoolRows<Source, Stride>{rows, stride};
}

// The place of a head in the first block.
inline AttentionPlace in_first_block(AttentionPlace place) {
  place.batch = 0;
  return place;
}

// Keys up to the length of the row, which is one of 0 .. keys or makes NaN of it.
inline RowKeys keys_up_to(const device int* lengths, AttentionPlace place, constant AttentionParams& params) {
  RowKeys row;
  row.starts = lengths;
  row.keys = params.keys;
  row.start_query = 0;
  row.has_starts = false;
  const int length = lengths[place.batch];
  row.is_sound = row.is_key(length);
  row.limit = row.is_sound ? uint(length) : 0;
  row.begin = 0;
  return row;
}

}  // namespace mittens
