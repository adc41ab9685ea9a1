// Appends keys and values of new tokens to blocks of a pool, which a table names for each row of the batch: token t
// becomes key p = positions[b] + t of row b,
//
//   pool[table[b, p / n], head, p % n] = new[b, head, t],   n: keys of a block
//
// or, where there is no such entry or block, go nowhere. lengths[b] = positions[b] + tokens. Packed pools hold groups
// as quantized_rope_append.metal packs them.
//
// A simdgroup takes a head of a token, or of a packed pool a group of one.
#include <metal_stdlib>

#include "cache/pack_group.h"
#include "cache/paged.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void paged_append(
    const device int* positions [[buffer(0)]],  // [batch]
    const device int* table [[buffer(1)]],      // [batch, entries]
    const device T* new_keys [[buffer(2)]],     // [batch, key heads, tokens, width]
    const device T* new_values [[buffer(3)]],   // [batch, key heads, tokens, value width]
    device int* lengths [[buffer(4)]],          // [batch]
    device T* keys [[buffer(5)]],               // [blocks, key heads, keys of a block, width]
    device T* values [[buffer(6)]],             // [blocks, key heads, keys of a block, value width]
    constant PagedAppendParams& params [[buffer(7)]], uint2 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint of_row = max(params.tokens, 1u);
  const uint batch = group.x / of_row;
  const uint token = group.x % of_row;
  const int position = positions[batch];
  const uint item = group.y * simdgroups + simdgroup;
  if (token == 0 && item == 0 && lane == 0) {
    lengths[batch] = position + int(params.tokens);
  }
  const PoolKey key = key_of_token(position, token, table, batch, params);
  if (token >= params.tokens || item >= 2 * params.key_heads || !key.is_there) {
    return;
  }
  const bool is_value = item >= params.key_heads;
  const uint head = is_value ? item - params.key_heads : item;
  const device T* from = is_value ? new_values + place_of_token(batch, head, token, params.new_values)
                                  : new_keys + place_of_token(batch, head, token, params.new_keys);
  device T* to = is_value ? values + place_of(key, head, params.values) : keys + place_of(key, head, params.keys);
  const uint width = is_value ? params.value_width : params.width;
  for (uint column = lane; column < width; column += 32) {
    to[column] = from[column];
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(128)]] void quantized_paged_append(
    const device int* positions [[buffer(0)]],  // [batch]
    const device int* table [[buffer(1)]],      // [batch, entries]
    const device T* new_keys [[buffer(2)]],     // [batch, key heads, tokens, width]
    const device T* new_values [[buffer(3)]],   // [batch, key heads, tokens, value width]
    device int* lengths [[buffer(4)]],          // [batch]
    device uint* key_words [[buffer(5)]],       // [blocks, key heads, keys of a block, width * bits / 32]
    device T* key_scales [[buffer(6)]],         // [blocks, key heads, keys of a block, width / group size]
    device T* key_biases [[buffer(7)]], device uint* value_words [[buffer(8)]], device T* value_scales [[buffer(9)]],
    device T* value_biases [[buffer(10)]], constant QuantizedPagedAppendParams& quantized [[buffer(11)]],
    uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]) {
  constant PagedAppendParams& params = quantized.append;
  const uint of_row = max(params.tokens, 1u);
  const uint batch = group.x / of_row;
  const uint token = group.x % of_row;
  const int position = positions[batch];
  const uint item = group.y * simdgroups + simdgroup;
  if (token == 0 && item == 0 && lane == 0) {
    lengths[batch] = position + int(params.tokens);
  }
  const uint key_groups = params.width / quantized.group_size;  // of a head
  const uint value_groups = params.value_width / quantized.group_size;
  const uint key_items = params.key_heads * key_groups;
  const PoolKey key = key_of_token(position, token, table, batch, params);
  if (token >= params.tokens || item >= key_items + params.key_heads * value_groups || !key.is_there) {
    return;
  }
  const bool is_value = item >= key_items;
  const uint groups = is_value ? value_groups : key_groups;
  const uint own = is_value ? item - key_items : item;
  const uint head = own / groups;
  const uint own_group = own % groups;
  const device T* from = is_value ? new_values + place_of_token(batch, head, token, params.new_values)
                                  : new_keys + place_of_token(batch, head, token, params.new_keys);
  const uint count = quantized.group_size / 32;
  const uint first = own_group * quantized.group_size + lane * count;
  float numbers[most_values];
#pragma unroll
  for (uint i = 0; i < most_values; ++i) {
    numbers[i] = i < count ? float(from[first + i]) : 0.0f;
  }
  const Packed packed = pack_group(numbers, count, quantized.bits, lane);
  const uint words = count * quantized.bits;  // of a group
  if (lane < words) {
    device uint* to =
        is_value ? value_words + place_of(key, head, params.values) : key_words + place_of(key, head, params.keys);
    to[own_group * words + lane] = packed.word;
  }
  if (lane == 0) {
    device T* scales = is_value ? value_scales + place_of(key, head, quantized.value_scales)
                                : key_scales + place_of(key, head, quantized.key_scales);
    device T* biases = is_value ? value_biases + place_of(key, head, quantized.value_biases)
                                : key_biases + place_of(key, head, quantized.key_biases);
    scales[own_group] = T(packed.scale);
    biases[own_group] = T(packed.bias);
  }
}

instantiate_types("paged_append", paged_append)
instantiate_types("quantized_paged_append", quantized_paged_append)
