// Attention of 1 to 16 rows of queries that share packed keys and values, in one pass over them: 4 or 8 bits with a scale
// and a bias for each 32, 64 or 128 elements of a head. In half types several rows are taken as products of matrices
// (attention/kv_quantized.h), one row and float32 by lanes (attention/decode.h).
#include <metal_stdlib>

#include "attention/kv_quantized.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

// The rows of one head.
template <typename T, int bits>
inline PackedRows<T, bits> packed_rows(
    const device uint* words, int64_t start, constant int64_t* strides, int stride, const device T* scales,
    int64_t scales_start, constant int64_t* scales_strides, int scales_stride, const device T* biases, int64_t biases_start,
    constant int64_t* biases_strides, int biases_stride, DecodeRows<T> rows, constant AttentionParams& params) {
  PackedRows<T, bits> packed;
  packed.bytes = (const device uchar*)(words + head_offset(start, strides, rows.batch, rows.key_head));
  packed.scales = scales + head_offset(scales_start, scales_strides, rows.batch, rows.key_head);
  packed.biases = biases + head_offset(biases_start, biases_strides, rows.batch, rows.key_head);
  packed.stride = stride * 4;
  packed.scales_stride = scales_stride;
  packed.biases_stride = biases_stride;
  packed.group_shift = params.group_shift;
  packed.aligned = params.aligned;
  return packed;
}

// Keys and values of a threadgroup's head.
template <typename T, int bits>
struct PackedHead {
  PackedRows<T, bits> keys;
  PackedRows<T, bits> values;
};

template <typename T, int bits>
inline PackedHead<T, bits> packed_head(
    const device uint* keys, const device T* key_scales, const device T* key_biases, const device uint* values,
    const device T* value_scales, const device T* value_biases, DecodeRows<T> rows, constant AttentionParams& params) {
  PackedHead<T, bits> packed;
  packed.keys = packed_rows<T, bits>(
      keys, params.key_start, params.key_strides, params.key_stride, key_scales, params.key_scales_start,
      params.key_scales_strides, params.key_scales_stride, key_biases, params.key_biases_start, params.key_biases_strides,
      params.key_biases_stride, rows, params);
  packed.values = packed_rows<T, bits>(
      values, params.value_start, params.value_strides, params.value_stride, value_scales, params.value_scales_start,
      params.value_scales_strides, params.value_scales_stride, value_biases, params.value_biases_start,
      params.value_biases_strides, params.value_biases_stride, rows, params);
  return packed;
}

template <typename T, int bits, int G, int R>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_decode_packed(
    const device T* queries [[buffer(0)]],        // [batch, heads, queries, width]
    const device uint* keys [[buffer(1)]],        // [batch, key_heads, keys, width * bits / 32]
    const device T* key_scales [[buffer(2)]],     // [batch, key_heads, keys, width / group]
    const device T* key_biases [[buffer(3)]],     // likewise
    const device uint* values [[buffer(4)]],      // as the keys
    const device T* value_scales [[buffer(5)]],
    const device T* value_biases [[buffer(6)]],
    const device T* mask [[buffer(7)]],           // [batch, heads, queries, keys], or of bools
    const device T* sinks [[buffer(8)]],          // [heads]
    device T* y [[buffer(9)]],                    // [batch, heads, queries, width], or float partial results
    constant AttentionParams& params [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float4 scratch[decode_scratch<G, R>()];
  threadgroup float maxima[R * decode_simdgroups];
  threadgroup float totals[R * decode_simdgroups];
  const DecodeRows<T> rows = decode_rows(queries, mask, sinks, y, group, R, params);
  const PackedHead<T, bits> head =
      packed_head<T, bits>(keys, key_scales, key_biases, values, value_scales, value_biases, rows, params);
  const uint left = decode<PackedRows<T, bits>, T, G, R>(
      rows, head.keys, head.values, params, group, t, lane, simdgroup, (threadgroup float*)scratch, maxima, totals);
  if (may_hide(params) && simd_any(left != 0)) {
    const DecodeRows<T> these = rows_anew(rows, queries, R, params);
    const PackedHead<T, bits> all =
        packed_head<T, bits>(keys, key_scales, key_biases, values, value_scales, value_biases, these, params);
    write_seen<DecodeShape<G, R>>(these, all.keys, all.values, params, group.y, t, left, maxima, totals);
  }
}

template <typename T, int bits, int W, int D, int B>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_decode_tiles_packed(
    const device T* queries [[buffer(0)]],        // as above
    const device uint* keys [[buffer(1)]],
    const device T* key_scales [[buffer(2)]],
    const device T* key_biases [[buffer(3)]],
    const device uint* values [[buffer(4)]],
    const device T* value_scales [[buffer(5)]],
    const device T* value_biases [[buffer(6)]],
    const device T* mask [[buffer(7)]],
    const device T* sinks [[buffer(8)]],
    device T* y [[buffer(9)]],
    constant AttentionParams& params [[buffer(10)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  using Tiles = PackedTiles<T, bits, W, D, B>;
  threadgroup float scratch[tile_scratch<Tiles>()];
  threadgroup float maxima[8 * B * decode_simdgroups];
  threadgroup float totals[8 * B * decode_simdgroups];
  const DecodeRows<T> rows = decode_rows(queries, mask, sinks, y, group, 8 * B, params);
  const PackedHead<T, bits> head =
      packed_head<T, bits>(keys, key_scales, key_biases, values, value_scales, value_biases, rows, params);
  Tiles tiles;
  tiles.keys = head.keys;
  tiles.values = head.values;
  const uint left =
      decode_tiles<Tiles, T, B>(rows, tiles, params, group, t, lane, simdgroup, scratch, maxima, totals);
  if (may_hide(params) && simd_any(left != 0)) {
    const DecodeRows<T> these = rows_anew(rows, queries, 8 * B, params);
    const PackedHead<T, bits> all =
        packed_head<T, bits>(keys, key_scales, key_biases, values, value_scales, value_biases, these, params);
    write_seen<typename Tiles::Shape>(these, all.keys, all.values, params, group.y, t, left, maxima, totals);
  }
}

#define instantiate_float32(bits, G, width, R)                                                                      \
  instantiate_kernel(                                                                                               \
      "attention_decode_" #bits "bit_" #width "_" #R "_float32", attention_decode_packed, float, bits, G, R)

#define instantiate_tiles_by(bits, W, width, R, B)                                                                  \
  instantiate_kernel(                                                                                               \
      "attention_decode_tiles_" #bits "bit_by" #W "_" #width "_" #R "_float16", attention_decode_tiles_packed,      \
      half, bits, W, width, B)                                                                                      \
  instantiate_kernel(                                                                                               \
      "attention_decode_tiles_" #bits "bit_by" #W "_" #width "_" #R "_bfloat16", attention_decode_tiles_packed,     \
      bfloat, bits, W, width, B)

// Groups of 32 columns, which leave no registers for more rows, and larger ones.
#define instantiate_tiles(bits, width)       \
  instantiate_tiles_by(bits, 32, width, 8, 1) \
  instantiate_tiles_by(bits, 64, width, 8, 1) \
  instantiate_tiles_by(bits, 64, width, 16, 2)

#define instantiate_one(bits, G, width) \
  instantiate_types("attention_decode_" #bits "bit_" #width "_1", attention_decode_packed, bits, G, 1)

#define instantiate_bits(bits)                                                                           \
  instantiate_one(bits, 8, 64)                                                                           \
  instantiate_float32(bits, 8, 64, 4)                                                                    \
  instantiate_float32(bits, 8, 64, 8)                                                                    \
  instantiate_float32(bits, 8, 64, 16)                                                                   \
  instantiate_tiles(bits, 64)                                                                            \
  instantiate_one(bits, 16, 128)                                                                         \
  instantiate_float32(bits, 16, 128, 4)                                                                  \
  instantiate_float32(bits, 16, 128, 8)                                                                  \
  instantiate_float32(bits, 16, 128, 16)                                                                 \
  instantiate_tiles(bits, 128)                                                                           \
  instantiate_one(bits, 32, 256)                                                                         \
  instantiate_types("attention_decode_" #bits "bit_256_4", attention_decode_packed, bits, 32, 4)         \
  instantiate_types("attention_decode_" #bits "bit_256_8", attention_decode_packed, bits, 32, 8)

instantiate_bits(4)
instantiate_bits(8)
