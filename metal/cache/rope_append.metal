// What a decoder layer does with new tokens before attention: rotary embedding of queries and keys, and keys and values
// into the cache. For token t at position m = scale * (offset + t), head by head, and i < pairs:
//
//   y[i]         = x[i] * cos(m * f[i]) - x[pairs + i] * sin(m * f[i])
//   y[pairs + i] = x[i] * sin(m * f[i]) + x[pairs + i] * cos(m * f[i]),   f[i] = base^(-i / pairs) or 1 / freqs[i]
//
// A batch may have an offset for each of its rows.
//
// Elements from 2 * pairs on and values stay as they are. With norms, x is first T(T(x * n) * weight) of its head, as
// rms_norm has it.
//
// A simdgroup takes 64 columns of a head of a token, so that a lane has at most one pair: rows are short and few, and what
// counts is that there is one launch, and how long its longest chain is.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/rms.h"
#include "params/cache.h"

using namespace metal;
using namespace mittens;

// A head's elements as the rotation takes them.
template <typename T, bool Normed>
struct Head {
  const device T* row;
  const device T* weight;
  float rstd;

  float at(uint column) const {
    const T x = row[column];
    return Normed ? round_to<T>(round_to<T>(float(x) * rstd) * float(weight[column])) : float(x);
  }
};

template <typename T, bool Normed>
inline void rotate_part(
    Head<T, Normed> head, const device float* freqs, device T* target, constant RopeAppendParams& params, int at,
    uint first, uint step) {
  const uint pairs = params.pairs;
  const float position = params.scale * float(at);
  if (first < pairs) {
    const float frequency =
        params.has_freqs ? 1.0f / freqs[first] : precise::exp2(-(float(first) / float(pairs)) * params.log2_base);
    const float angle = position * frequency;
    const float c = precise::cos(angle);
    const float s = precise::sin(angle);
    const float x = head.at(first);
    const float y = head.at(pairs + first);
    target[first] = T(x * c - y * s);
    target[pairs + first] = T(x * s + y * c);
  }
  for (uint column = 2 * pairs + first; column < params.width; column += step) {
    target[column] = T(head.at(column));
  }
}

template <typename T>
inline const device T* row_of(
    const device T* heads, constant const int64_t (&strides)[3], uint batch, uint head, uint token) {
  return heads + batch * strides[0] + head * strides[1] + token * strides[2];
}

template <typename T, bool Normed>
[[kernel, max_total_threads_per_threadgroup(128)]] void rope_append(
    const device T* new_queries [[buffer(0)]],  // [batch, query heads, tokens, width] by params.query_strides
    const device T* new_keys [[buffer(1)]],     // [batch, key heads, tokens, width] by params.key_strides
    const device T* new_values [[buffer(2)]],   // [batch, key heads, tokens, width] by params.value_strides
    const device float* freqs [[buffer(3)]],    // [pairs]
    const device T* query_norm [[buffer(4)]],   // [width]
    const device T* key_norm [[buffer(5)]],     // [width]
    const device int* offsets [[buffer(6)]],    // [batch]
    device T* queries [[buffer(7)]],            // [batch, query heads, tokens, width]
    device T* keys [[buffer(8)]],               // [batch, key heads, key capacity, width]
    device T* values [[buffer(9)]],             // [batch, key heads, value capacity, width]
    constant RopeAppendParams& params [[buffer(10)]],
    uint2 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint batch = group.x / params.tokens;
  const uint token = group.x % params.tokens;
  const uint width = params.width;
  const uint parts = (width + 63) / 64;  // of a head
  const uint head = (group.y * simdgroups + simdgroup) / parts;
  const uint first = (group.y * simdgroups + simdgroup) % parts * 32 + lane;
  const uint step = 32 * parts;
  if (head >= params.query_heads + 2 * params.key_heads) {
    return;
  }

  if (head >= params.query_heads + params.key_heads) {
    const uint value_head = head - params.query_heads - params.key_heads;
    const device T* row = row_of(new_values, params.value_strides, batch, value_head, token);
    device T* target =
        values + (size_t(batch * params.key_heads + value_head) * params.value_capacity + params.first + token) * width;
    for (uint column = first; column < width; column += step) {
      target[column] = row[column];
    }
    return;
  }
  const bool is_query = head < params.query_heads;
  const device T* row;
  device T* target;
  if (is_query) {
    row = row_of(new_queries, params.query_strides, batch, head, token);
    target = queries + (size_t(batch * params.query_heads + head) * params.tokens + token) * width;
  } else {
    const uint key_head = head - params.query_heads;
    row = row_of(new_keys, params.key_strides, batch, key_head, token);
    target = keys + (size_t(batch * params.key_heads + key_head) * params.key_capacity + params.first + token) * width;
  }
  float inverse = 1.0f;
  if (Normed) {
    float sum = 0;
    for (uint column = lane; column < width; column += 32) {
      const float x = float(row[column]);
      sum += x * x;
    }
    inverse = rstd(simd_sum(sum), width, params.eps);
  }
  const int at = (params.has_offsets ? offsets[batch] : params.offset) + int(token);
  rotate_part<T, Normed>(
      Head<T, Normed>{row, is_query ? query_norm : key_norm, inverse}, freqs, target, params, at, first, step);
}

instantiate_types("rope_append", rope_append, false)
instantiate_types("rope_append_normed", rope_append, true)
