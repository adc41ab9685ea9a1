// Attention as products of matrices (attention/decode_mma.h): of 3 and more rows of queries that share keys and values, in
// float32 of 5 to 8, and of prompts of any length with heads of 64 and 128 elements, in float32 on NVIDIA GPUs. The
// simdgroups of a threadgroup share out the keys of 8 or 16 rows. Several threadgroups may do so too;
// attention/attention_combine.metal then puts together what they leave.
//
// In half types 16 rows are what a key is multiplied with each time that it is loaded, twice what a simdgroup of the
// prefill kernel had registers for: an Apple GPU's small cache then counts for less. In float32 there are registers for 8.
//
// In decoding, heads of less than 64 or 128 elements take the kernel of the next larger width; wider ones would not fit the
// registers.
#include <metal_stdlib>

#include "attention/kv_dense.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, int D, int B>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_decode_tiles(
    const device T* queries [[buffer(0)]],  // [batch, heads, queries, width]
    const device T* keys [[buffer(1)]],     // [batch, key_heads, keys, width]
    const device T* values [[buffer(2)]],   // [batch, key_heads, keys, width]
    const device T* mask [[buffer(3)]],     // [batch, heads, queries, keys], or of bools
    const device T* sinks [[buffer(4)]],    // [heads]
    device T* y [[buffer(5)]],              // [batch, heads, queries, width], or float partial results
    constant AttentionParams& params [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  using Tiles = PlainTiles<T, D, B>;
  threadgroup float4 scratch[tile_scratch<Tiles>() / 4];
  threadgroup float maxima[8 * B * decode_simdgroups];
  threadgroup float totals[8 * B * decode_simdgroups];
  const DecodeRows<T> rows = decode_rows(queries, mask, sinks, y, group, 8 * B, params);
  const PlainHead<T> head = plain_head(keys, values, rows, params);
  Tiles tiles;
  tiles.keys = head.keys;
  tiles.values = head.values;
  const uint left = decode_tiles<Tiles, T, B>(
      rows, tiles, params, group, t, lane, simdgroup, (threadgroup float*)scratch, maxima, totals);
  if (may_hide(params) && simd_any(left != 0)) {
    const DecodeRows<T> these = rows_anew(rows, queries, 8 * B, params);
    const PlainHead<T> all = plain_head(keys, values, these, params);
    write_seen<typename Tiles::Shape>(these, all.keys, all.values, params, group.y, t, left, maxima, totals);
  }
}

#define instantiate_tiles(T, name, width, rows, B) \
  instantiate_kernel("attention_decode_tiles_" #width "_" #rows "_" name, attention_decode_tiles, T, width, B)

#define instantiate_halfs(T, name)        \
  instantiate_tiles(T, name, 64, 8, 1)    \
  instantiate_tiles(T, name, 64, 16, 2)   \
  instantiate_tiles(T, name, 128, 8, 1)   \
  instantiate_tiles(T, name, 128, 16, 2)

instantiate_halfs(half, "float16")
instantiate_halfs(bfloat, "bfloat16")
instantiate_tiles(float, "float32", 64, 8, 1)
instantiate_tiles(float, "float32", 128, 8, 1)
