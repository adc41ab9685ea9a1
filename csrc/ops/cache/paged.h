// Checks that the append and the attention share, for keys and values in blocks of a pool. A table names the blocks of
// each row of the batch.
#pragma once

#include <tuple>
#include <variant>

#include "runtime/primitive.h"

namespace mittens {

// Blocks of elements, or words, scales and biases: [blocks, heads, keys of a block, ..].
using Pool = std::variant<mx::array, std::tuple<mx::array, mx::array, mx::array>>;

inline bool is_packed(const Pool& pool) {
  return !std::holds_alternative<mx::array>(pool);
}

Arrays arrays_of(const Pool& pool);

void check_both_packed(const char* op, const Pool& keys, const Pool& values);

// A simdgroup takes 16 keys of one block at once.
void check_block_keys(const char* op, int keys);

// rows: of the batch.
void check_block_table(const char* op, const mx::array& table, int rows);

// A number for each row of the batch.
void check_numbers(const char* op, const char* name, const mx::array& numbers, int rows);

// Which entries of a table are among the blocks of the pool.
mx::array are_blocks(const mx::array& entries, const mx::array& pool, mx::Stream stream);

}  // namespace mittens
