// Attention of 1 to 16 rows of queries that share keys and values (attention/decode.h); where heads have up to 128 elements
// of 1 and 2 in half types, and in float32 of up to 4 and more than 8, as attention/attention_mma.metal takes the others.
// Several threadgroups may share the keys of a row; attention/attention_combine.metal then puts together what they leave.
//
// A head of up to 8 * G elements is spread over G lanes: 64, 128 and 256 fill them, widths between leave lanes idle.
#include <metal_stdlib>

#include "attention/decode.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, int G, int R>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_decode(
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
  threadgroup float4 scratch[decode_scratch<G, R>()];
  threadgroup float maxima[R * decode_simdgroups];
  threadgroup float totals[R * decode_simdgroups];
  const DecodeRows<T> rows = decode_rows(queries, mask, sinks, y, group, R, params);
  const PlainHead<T> head = plain_head(keys, values, rows, params);
  const uint left = decode<PlainRows<T>, T, G, R>(
      rows, head.keys, head.values, params, group, t, lane, simdgroup, (threadgroup float*)scratch, maxima, totals);
  if (may_hide(params) && simd_any(left != 0)) {
    const DecodeRows<T> these = rows_anew(rows, queries, R, params);
    const PlainHead<T> all = plain_head(keys, values, these, params);
    write_seen<DecodeShape<G, R>>(these, all.keys, all.values, params, group.y, t, left, maxima, totals);
  }
}

#define instantiate_float32(G, width, R) \
  instantiate_kernel("attention_decode_" #width "_" #R "_float32", attention_decode, float, G, R)

#define instantiate_few(G, width)                                           \
  instantiate_types("attention_decode_" #width "_1", attention_decode, G, 1) \
  instantiate_types("attention_decode_" #width "_2", attention_decode, G, 2)

instantiate_few(8, 64)
instantiate_float32(8, 64, 4)
instantiate_float32(8, 64, 16)
instantiate_few(16, 128)
instantiate_float32(16, 128, 4)
instantiate_float32(16, 128, 16)
instantiate_few(32, 256)
instantiate_types("attention_decode_256_4", attention_decode, 32, 4)
instantiate_types("attention_decode_256_8", attention_decode, 32, 8)
