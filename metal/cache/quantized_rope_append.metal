// rope_append (rope_append.metal) into a cache whose keys and values are quantized: the turned keys and the values,
// rounded to T, become integers of 2, 3, 4, 5, 6 or 8 bits, as mx.quantize packs them. For a group of elements v, with
// low = min v, high = max(0, max v) and levels = 2^bits - 1:
//
//   edge  = low where |low| > |high|, else high
//   step  = max((high - low) / levels, 1e-7), with the sign of -edge
//   scale = edge / round(edge / step), bias = edge, or step and 0 where round(edge / step) = 0
//   q     = min(round((v - bias) / scale), levels)
//
// round takes halves away from zero. Integer i of a group stands at bits [i * bits, (i + 1) * bits) of its words.
// These are the steps of MLX's kernels for GPUs, each rounded to float32: the words are the same.
//
// A simdgroup takes 64 columns of a head of queries, or a group of a head of keys or values: a lane has its neighbours,
// and then a word of the group.
#include <metal_stdlib>

#include "cache/pack_group.h"
#include "cache/rope.h"
#include "mittens/instantiate.h"
#include "params/cache.h"

using namespace metal;
using namespace mittens;

template <typename T, bool Normed>
[[kernel, max_total_threads_per_threadgroup(128)]] void quantized_rope_append(
    const device T* new_queries [[buffer(0)]],  // [batch, query heads, tokens, width] by params.query_strides
    const device T* new_keys [[buffer(1)]],     // [batch, key heads, tokens, width] by params.key_strides
    const device T* new_values [[buffer(2)]],   // [batch, key heads, tokens, width] by params.value_strides
    const device float* freqs [[buffer(3)]],    // [pairs]
    const device T* query_norm [[buffer(4)]],   // [width]
    const device T* key_norm [[buffer(5)]],     // [width]
    const device int* offsets [[buffer(6)]],    // [batch]
    device T* queries [[buffer(7)]],            // [batch, query heads, tokens, width]
    device uint* key_words [[buffer(8)]],       // [batch, key heads, key capacity, width * bits / 32]
    device T* key_scales [[buffer(9)]],         // [batch, key heads, key capacity, width / group size]
    device T* key_biases [[buffer(10)]],
    device uint* value_words [[buffer(11)]],  // [batch, key heads, value capacity, width * bits / 32]
    device T* value_scales [[buffer(12)]],    // [batch, key heads, value capacity, width / group size]
    device T* value_biases [[buffer(13)]], constant QuantizedRopeAppendParams& quantized [[buffer(14)]],
    uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  constant RopeAppendParams& params = quantized.rope;
  const uint batch = group.x / params.tokens;
  const uint token = group.x % params.tokens;
  const uint width = params.width;
  const uint item = group.y * simdgroups + simdgroup;
  const int at = (params.has_offsets ? offsets[batch] : params.offset) + int(token);

  const uint parts = (width + 63) / 64;  // of a head of queries
  const uint query_items = params.query_heads * parts;
  if (item < query_items) {
    const uint head = item / parts;
    const Head<T, Normed> turned = load_head<T, Normed>(
        row_of(new_queries, params.query_strides, batch, head, token), query_norm, width, 1.0f, params, lane);
    device T* target = queries + (size_t(batch * params.query_heads + head) * params.tokens + token) * width;
    rotate_part<T, Normed>(turned, freqs, target, params, at, item % parts * 32 + lane, 32 * parts);
    return;
  }
  const uint groups = width / quantized.group_size;  // of a head
  const uint head = (item - query_items) / groups;   // of keys, then of values
  if (head >= 2 * params.key_heads) {
    return;
  }
  const bool is_value = head >= params.key_heads;
  const uint own_head = is_value ? head - params.key_heads : head;
  const uint own_group = (item - query_items) % groups;
  const uint count = quantized.group_size / 32;
  const uint first = own_group * quantized.group_size + lane * count;
  float values[most_values];
  if (is_value) {
    const device T* row = row_of(new_values, params.value_strides, batch, own_head, token);
#pragma unroll
    for (uint i = 0; i < most_values; ++i) {
      values[i] = i < count ? float(row[first + i]) : 0.0f;
    }
  } else {
    const Head<T, Normed> turned = load_head<T, Normed>(
        row_of(new_keys, params.key_strides, batch, own_head, token), key_norm, width, 1.0f, params, lane);
#pragma unroll
    for (uint i = 0; i < most_values; ++i) {
      values[i] = i < count ? float(rotated<T, Normed>(turned, freqs, params, at, first + i)) : 0.0f;
    }
  }
  const Packed packed = pack_group(values, count, quantized.bits, lane);
  const uint capacity = is_value ? params.value_capacity : params.key_capacity;
  const size_t row = size_t(batch * params.key_heads + own_head) * capacity + params.first + token;
  const uint words = count * quantized.bits;  // of a group
  if (lane < words) {
    device uint* target = is_value ? value_words : key_words;
    target[(row * groups + own_group) * words + lane] = packed.word;
  }
  if (lane == 0) {
    (is_value ? value_scales : key_scales)[row * groups + own_group] = T(packed.scale);
    (is_value ? value_biases : key_biases)[row * groups + own_group] = T(packed.bias);
  }
}

instantiate_types("quantized_rope_append", quantized_rope_append, false)
instantiate_types("quantized_rope_append_normed", quantized_rope_append, true)
