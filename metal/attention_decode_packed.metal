// Attention of 1 to 16 tokens over packed keys and values, in one pass over them (mittens/decode.h): 4 or 8 bits with a
// scale and a bias for each 32, 64 or 128 elements of a head.
#include <metal_stdlib>

#include "mittens/decode.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

// One head's rows, from an element on.
template <typename T, int bits>
inline PackedRows<T, bits> packed_rows(
    const device uint* words, const device T* scales, const device T* biases, uint element,
    constant AttentionParams& params) {
  PackedRows<T, bits> rows;
  rows.bytes = (const device uchar*)words + element * bits / 8;
  rows.scales = scales + (element >> params.group_shift);
  rows.biases = biases + (element >> params.group_shift);
  rows.aligned = params.aligned;
  return rows;
}

inline int64_t head_offset(int64_t start, constant int64_t* strides, uint batch, uint head) {
  return start + batch * strides[0] + head * strides[1];
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
  using Shape = DecodeShape<G, R>;
  threadgroup float4 scratch[decode_scratch<G, R>()];
  threadgroup float maxima[R * decode_simdgroups];
  threadgroup float totals[R * decode_simdgroups];
  const DecodeRows<T> rows = decode_rows(queries, mask, sinks, y, group, R, params);
  const uint b = rows.batch;
  const uint h = rows.key_head;
  PackedRows<T, bits> k = packed_rows<T, bits>(
      keys + head_offset(params.key_start, params.key_strides, b, h),
      key_scales + head_offset(params.key_scales_start, params.key_scales_strides, b, h),
      key_biases + head_offset(params.key_biases_start, params.key_biases_strides, b, h),
      lane_elements(lane, G, 8, params.width), params);
  k.stride = params.key_stride * 4;
  k.scales_stride = params.key_scales_stride;
  k.biases_stride = params.key_biases_stride;
  PackedRows<T, bits> v = packed_rows<T, bits>(
      values + head_offset(params.value_start, params.value_strides, b, h),
      value_scales + head_offset(params.value_scales_start, params.value_scales_strides, b, h),
      value_biases + head_offset(params.value_biases_start, params.value_biases_strides, b, h),
      lane_elements(lane, Shape::value_lanes, Shape::value_elements, params.width), params);
  v.stride = params.value_stride * 4;
  v.scales_stride = params.value_scales_stride;
  v.biases_stride = params.value_biases_stride;
  decode<PackedRows<T, bits>, T, G, R>(
      rows, k, v, params, group.x, t, lane, simdgroup, (threadgroup float*)scratch, maxima, totals);
}

#define instantiate_decode(bits, G, width, R) \
  instantiate_types("attention_decode_" #bits "bit_" #width "_" #R, attention_decode_packed, bits, G, R)

#define instantiate_decode_bits(bits)   \
  instantiate_decode(bits, 8, 64, 1)    \
  instantiate_decode(bits, 8, 64, 4)    \
  instantiate_decode(bits, 8, 64, 8)    \
  instantiate_decode(bits, 8, 64, 16)   \
  instantiate_decode(bits, 16, 128, 1)  \
  instantiate_decode(bits, 16, 128, 4)  \
  instantiate_decode(bits, 16, 128, 8)  \
  instantiate_decode(bits, 16, 128, 16) \
  instantiate_decode(bits, 32, 256, 1)  \
  instantiate_decode(bits, 32, 256, 4)  \
  instantiate_decode(bits, 32, 256, 8)

instantiate_decode_bits(4)
instantiate_decode_bits(8)
