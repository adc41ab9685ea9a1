#include "ops/cache/paged.h"

#include <bit>

#include "mlx/ops.h"
#include "runtime/checks.h"

namespace mittens {

namespace {

constexpr int fewest_block_keys = 16;

void check_int32(const char* op, const char* name, const mx::array& numbers) {
  if (numbers.dtype() != mx::int32) {
    checks::fail<DtypeError>(op, name, " has dtype ", numbers.dtype(),
                             ": expected int32; convert it by .astype(mx.int32)");
  }
}

}  // namespace

Arrays arrays_of(const Pool& pool) {
  if (const auto* rows = std::get_if<mx::array>(&pool)) {
    return {*rows};
  }
  return std::apply([](const auto&... each) { return Arrays{each...}; }, std::get<1>(pool));
}

void check_both_packed(const char* op, const Pool& keys, const Pool& values) {
  if (is_packed(keys) != is_packed(values)) {
    checks::fail(op, is_packed(keys) ? "key_blocks" : "value_blocks",
                 " is a triple and the other an array: expected both to be packed, or none");
  }
}

void check_block_keys(const char* op, int keys) {
  if (keys < fewest_block_keys || !std::has_single_bit(static_cast<uint32_t>(keys))) {
    checks::fail(op, "key_blocks has blocks of ", keys, " keys: expected 16, 32, 64 or another power of two");
  }
}

void check_block_table(const char* op, const mx::array& table, int rows) {
  check_int32(op, "block_table", table);
  if (table.ndim() != 2 || table.shape(0) != rows) {
    checks::fail(op, "block_table has shape ", table.shape(), ": expected two dimensions, the first of ", rows,
                 " rows");
  }
}

void check_numbers(const char* op, const char* name, const mx::array& numbers, int rows) {
  check_int32(op, name, numbers);
  if (const mx::Shape shape = {rows}; numbers.shape() != shape) {
    checks::fail(op, name, " has shape ", numbers.shape(), ": expected ", shape,
                 ", a number for each row of the batch");
  }
}

mx::array are_blocks(const mx::array& entries, const mx::array& pool, mx::Stream s) {
  return mx::logical_and(mx::greater_equal(entries, mx::array(0), s), mx::less(entries, mx::array(pool.shape(0)), s),
                         s);
}

}  // namespace mittens
