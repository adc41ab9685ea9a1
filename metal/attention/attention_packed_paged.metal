// Attention over keys and values of 8 bits, in blocks that a table names for each row of the batch, up to the row's
// length: attention/attention.h for each type and width of heads.
#include <metal_stdlib>

#include "attention/packed.h"
#include "attention/paged.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

namespace mittens {

template <typename T, int bits, int E>
inline PoolRows<Affine<T, bits, E>, AffineStart> in_blocks(
    Affine<T, bits, E> rows, constant TokenRows& words, constant TokenRows& scales, constant TokenRows& biases) {
  return pool_rows(rows, AffineStart{uint(words.batch), uint(scales.batch), uint(biases.batch)});
}

// Rows that are counted from the first key of all, not of the block.
template <typename T, int bits, int E>
inline Affine<T, bits, E> rows_in(TableBlock block, PoolRows<Affine<T, bits, E>, AffineStart> pool) {
  Affine<T, bits, E> rows = pool.rows;
  rows.start.words += block.at * pool.stride.words - block.first * rows.matrix.words_stride;
  rows.start.scales += block.at * pool.stride.scales - block.first * rows.matrix.scales_stride;
  rows.start.biases += block.at * pool.stride.biases - block.first * rows.matrix.biases_stride;
  return rows;
}

}  // namespace mittens

template <typename T, int bits, int D, int DV, Phase phase>
[[kernel, max_total_threads_per_threadgroup(32 * attention_simdgroups<phase>(D))]] void attention_packed_paged(
    packed_attention_inputs,                  // keys and values [blocks, key_heads, keys of a block, ..]
    const device int* lengths [[buffer(9)]],  // [batch]
    const device int* table [[buffer(10)]],   // [batch, entries]
    device T* y [[buffer(11)]],               // [batch, heads, queries, DV], or float partial results
    device float* logsumexp [[buffer(12)]],   // [batch, heads, queries]
    constant PagedAttentionParams& params [[buffer(13)]], lane_of_simdgroup,
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  using Shape = AttentionShape<T, D, DV, phase>;
  threadgroup float4 scratch[Shape::scratch];
  threadgroup AttentionRow rows[kQueryRows * Shape::simdgroups];
  constant AttentionParams& common = params.attention;
  const AttentionPlace place = place_of<Shape>(group, lane, simdgroup, simdgroups, common);
  const AttentionPlace in_pool = in_first_block(place);
  attention<Shape>(
      queries,
      in_blocks(
          keys_of<Shape, bits>(keys, key_scales, key_biases, common, in_pool), common.key, common.key_scale,
          common.key_bias),
      in_blocks(
          values_of<Shape, bits>(values, value_scales, value_biases, common, in_pool), common.value, common.value_scale,
          common.value_bias),
      mask, sinks, y, logsumexp, keys_up_to(lengths, place, common), block_table(table, place, params), common, place,
      scratch, rows);
}

#define instantiate_types_of(D)                                                               \
  instantiate_head_of(float, "float32", "attention_paged", attention_packed_paged, 8, D, D)   \
  instantiate_head_of(half, "float16", "attention_paged", attention_packed_paged, 8, D, D)    \
  instantiate_head_of(bfloat, "bfloat16", "attention_paged", attention_packed_paged, 8, D, D)

instantiate_types_of(64)
instantiate_types_of(96)
instantiate_types_of(128)
