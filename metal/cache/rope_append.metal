// The steps of a decoder layer between projections and attention: rotary embedding of queries and keys, and keys and
// values into the cache. For token t at position m = scale * (offset + t), head by head, and i < pairs:
//
//   y[i]         = x[i] * cos(m * f[i]) - x[pairs + i] * sin(m * f[i])
//   y[pairs + i] = x[i] * sin(m * f[i]) + x[pairs + i] * cos(m * f[i]),   f[i] = base^(-i / pairs) or 1 / freqs[i]
//
// Traditional pairs are the neighbours x[2 * i] and x[2 * i + 1] instead. A batch may have an offset for each of its
// rows.
//
// Elements from 2 * pairs on and values stay as they are. With norms, x is first T(T(x * n) * (weight + offset)) of its
// head, as rms_norm has it. Values may have a norm of their own, T(T(v * n) * weight) times a scale, and another width:
// the latents of a layer whose heads share them. Queries may be multiplied by a scale after they are turned. Columns of
// queries and keys before params.begin are copied. Where it is above 0, all heads of keys share the columns from there
// on.
//
// A simdgroup takes 64 columns of a head of a token, so that a lane has at most one pair: rows are short and few, so
// time goes by the number of launches and the longest chain of operations.
#include <metal_stdlib>

#include "cache/rope.h"
#include "mittens/instantiate.h"
#include "params/cache.h"

using namespace metal;
using namespace mittens;

template <typename T, bool Normed>
[[kernel, max_total_threads_per_threadgroup(128)]] void rope_append(
    const device T* new_queries [[buffer(0)]],  // [batch, query heads, tokens, width] by params.query_strides
    const device T* new_keys [[buffer(1)]],     // [batch, key heads, tokens, width or begin] by params.key_strides
    const device T* new_values [[buffer(2)]],   // [batch, key heads, tokens, value width] by params.value_strides
    const device T* shared_key [[buffer(3)]],   // [batch, tokens, width - begin] by params.shared_key_strides
    const device float* freqs [[buffer(4)]],    // [pairs]
    const device T* query_norm [[buffer(5)]],   // [width]
    const device T* key_norm [[buffer(6)]],     // [width]
    const device T* value_norm [[buffer(7)]],   // [value width]
    const device int* offsets [[buffer(8)]],    // [batch]
    device T* queries [[buffer(9)]],            // [batch, query heads, tokens, width]
    device T* keys [[buffer(10)]],              // [batch, key heads, key capacity, width]
    device T* values [[buffer(11)]],            // [batch, key heads, value capacity, value width]
    constant RopeAppendParams& params [[buffer(12)]], uint2 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint batch = group.x / params.tokens;
  const uint token = group.x % params.tokens;
  const uint width = params.width;
  uint item = group.y * simdgroups + simdgroup;
  const uint turned_items = (params.query_heads + params.key_heads) * ((width + 63) / 64);
  const bool is_value = item >= turned_items;
  item -= is_value ? turned_items : 0;
  const uint parts =
      max(((is_value ? params.value_width : width) + 63) / 64, 1u);  // of a head, which may have no values
  const uint head = item / parts;
  const uint first = item % parts * 32 + lane;
  const uint step = 32 * parts;

  if (is_value) {
    if (head >= params.key_heads) {
      return;
    }
    const device T* row = row_of(new_values, params.value_strides, batch, head, token);
    device T* target =
        values +
        (size_t(batch * params.key_heads + head) * params.value_capacity + params.first + token) * params.value_width;
    if (params.has_value_norm) {
      const Head<T, true> normed =
          load_head<T, true>(row, value_norm, params.value_width, params.value_scale, params, lane);
      for (uint column = first; column < params.value_width; column += step) {
        target[column] = T(normed.at(column));
      }
      return;
    }
    for (uint column = first; column < params.value_width; column += step) {
      target[column] = row[column];
    }
    return;
  }
  const bool is_query = head < params.query_heads;
  const device T* row;      // its columns before params.begin
  const device T* to_turn;  // and the others
  device T* target;
  if (is_query) {
    row = row_of(new_queries, params.query_strides, batch, head, token);
    to_turn = row + params.begin;
    target = queries + (size_t(batch * params.query_heads + head) * params.tokens + token) * width;
  } else {
    const uint key_head = head - params.query_heads;
    row = row_of(new_keys, params.key_strides, batch, key_head, token);
    to_turn = params.begin == 0
                  ? row
                  : shared_key + batch * params.shared_key_strides[0] + token * params.shared_key_strides[1];
    target = keys + (size_t(batch * params.key_heads + key_head) * params.key_capacity + params.first + token) * width;
  }
  const int at = (params.has_offsets ? offsets[batch] : params.offset) + int(token);
  for (uint column = first; column < params.begin; column += step) {
    target[column] = row[column];
  }
  const Head<T, Normed> turned = load_head<T, Normed>(
      to_turn, is_query ? query_norm : key_norm, width, is_query ? params.query_scale : 1.0f, params, lane);
  rotate_part<T, Normed>(turned, freqs, target + params.begin, params, at, first, step);
}

instantiate_types("rope_append", rope_append, false)
instantiate_types("rope_append_normed", rope_append, true)
