// Attention over keys and values as they are, in blocks that a table names for each row of the batch, up to the row's
// length: attention/attention.h for each type and width of heads.
#include <metal_stdlib>

#include "attention/dense.h"
#include "attention/paged.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

namespace mittens {

template <typename T, int E>
inline PoolRows<Dense<T, E>, uint> in_blocks(Dense<T, E> rows, constant TokenRows& strides) {
  return pool_rows(rows, uint(strides.batch / Dense<T, E>::of_load));
}

// Rows that are counted from the first key of all, not of the block.
template <typename T, int E>
inline Dense<T, E> rows_in(TableBlock block, PoolRows<Dense<T, E>, uint> pool) {
  Dense<T, E> rows = pool.rows;
  rows.start += block.at * pool.stride - block.first * rows.stride;
  return rows;
}

}  // namespace mittens

template <typename T, int D, int DV, Phase phase>
[[kernel, max_total_threads_per_threadgroup(32 * attention_simdgroups<phase>(D))]] void attention_paged(
    dense_attention_inputs,                   // keys and values [blocks, key_heads, keys of a block, ..]
    const device int* lengths [[buffer(5)]],  // [batch]
    const device int* table [[buffer(6)]],    // [batch, entries]
    device T* y [[buffer(7)]],                // [batch, heads, queries, DV], or float partial results
    device float* logsumexp [[buffer(8)]],    // [batch, heads, queries]
    constant PagedAttentionParams& params [[buffer(9)]], lane_of_simdgroup,
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  using Shape = AttentionShape<T, D, DV, phase>;
  threadgroup float4 scratch[Shape::scratch];
  threadgroup AttentionRow rows[kQueryRows * Shape::simdgroups];
  constant AttentionParams& common = params.attention;
  const AttentionPlace place = place_of<Shape>(group, lane, simdgroup, simdgroups, common);
  const AttentionPlace in_pool = in_first_block(place);
  attention<Shape>(
      queries, in_blocks(keys_of<Shape>(keys, common, in_pool), common.key),
      in_blocks(values_of<Shape>(values, common, in_pool), common.value), mask, sinks, y, logsumexp,
      keys_up_to(lengths, place, common), block_table(table, place, params), common, place, scratch, rows);
}

instantiate_head("attention_paged", attention_paged, 64, 64)
instantiate_head("attention_paged", attention_paged, 80, 80)
instantiate_head("attention_paged", attention_paged, 96, 96)
instantiate_head("attention_paged", attention_paged, 128, 128)
instantiate_head("attention_paged", attention_paged, 256, 256)
