// Keys and values of new tokens into blocks of a pool that a table names, on the CPU.
#pragma once

#include "cpu/cache/rope_append.h"

namespace mittens::cpu {

// Rows of a pool, [blocks, key heads, keys of a block, ..], by strides; the last is 1.
struct PoolRows {
  void* data = nullptr;
  int64_t strides[3] = {};  // block, head, key
};

// Elements, or words, scales and biases.
struct Pool {
  PoolRows rows;
  PoolRows scales;
  PoolRows biases;
};

struct PagedAppend {
  Type type;
  const int32_t* positions;  // [batch]: the key that a row's first new token becomes
  const int32_t* table;  // [batch, entries]
  size_t table_entries;
  size_t table_row;  // stride of the table's rows
  size_t blocks;  // of the pool
  unsigned block_shift;  // a block is 1 << block_shift keys
  Heads new_keys;
  Heads new_values;
  Pool keys;  // keys without a new token stay unchanged
  Pool values;
  int32_t* lengths;  // [batch]: positions and tokens
  size_t batch;
  size_t key_heads;
  size_t tokens;
  size_t width;
  size_t value_width;
  size_t group_size;  // of packed keys and values: 32, 64 or 128
  size_t bits;  // 0 where they are not packed
};

// A token that has no entry of the table, or no block of the pool, is left out.
void paged_append(const PagedAppend& call);

}  // namespace mittens::cpu
