// Keys and values of 4 and 8 bits, as mx.quantize packs them: buffers of the kernels that read them, sources of rows, and
// the widths of heads.
#pragma once

#include "attention/attention.h"
#include "mittens/source/affine.h"

#define packed_attention_inputs                                                                   \
  const device T* queries [[buffer(0)]],         /* [batch, heads, queries, D] */                 \
  const device uint* keys [[buffer(1)]],         /* [batch, key_heads, keys, D * bits / 32] */    \
  const device T* key_scales [[buffer(2)]],      /* [batch, key_heads, keys, groups] */           \
  const device T* key_biases [[buffer(3)]],                                                       \
  const device uint* values [[buffer(4)]],       /* [batch, key_heads, keys, DV * bits / 32] */   \
  const device T* value_scales [[buffer(5)]],                                                     \
  const device T* value_biases [[buffer(6)]],                                                     \
  const device T* mask [[buffer(7)]],            /* [batch, heads, queries, keys], or of bools */ \
  const device T* sinks [[buffer(8)]]            /* [heads] */

namespace mittens {

inline uint start_of(constant TokenRows& rows, AttentionPlace place) {
  return uint(TokenRows::at(int64_t(0), rows, place.batch, place.key_head, 0));
}

// The runs of a head.
template <typename T, int bits, int E>
inline Affine<T, bits, E> head_of(
    const device uint* words, const device T* scales, const device T* biases, constant TokenRows& rows,
    constant TokenRows& scale_rows, constant TokenRows& bias_rows, uint group_shift, AttentionPlace place) {
  return Affine<T, bits, E>{
      {words, scales, biases, uint(rows.token), uint(scale_rows.token), uint(bias_rows.token)},
      group_shift,
      {start_of(rows, place), start_of(scale_rows, place), start_of(bias_rows, place)}};
}

// Integers of a run of `columns` that `lanes` share: 16 bytes, and no more than a group.
constexpr int packed_run(int bits, int columns, int lanes) {
  return run_size(columns, lanes, 128 / bits < 32 ? 128 / bits : 32);
}

template <typename Shape, int bits, typename T>
inline Affine<T, bits, packed_run(bits, Shape::width, 4)> keys_of(
    const device uint* keys, const device T* scales, const device T* biases, constant AttentionParams& params,
    AttentionPlace place) {
  return head_of<T, bits, packed_run(bits, Shape::width, 4)>(
      keys, scales, biases, params.key, params.key_scale, params.key_bias, params.group_shift, place);
}

template <typename Shape, int bits, typename T>
inline Affine<T, bits, packed_run(bits, Shape::columns, 8)> values_of(
    const device uint* values, const device T* scales, const device T* biases, constant AttentionParams& params,
    AttentionPlace place) {
  return head_of<T, bits, packed_run(bits, Shape::columns, 8)>(
      values, scales, biases, params.value, params.value_scale, params.value_bias, params.group_shift, place);
}

}  // namespace mittens

// Kernels of all widths of heads and types, called <name>_decode_<bits>bit_<D>_<DV>_<dtype>, and prompt for decode.
#define instantiate_head_of(T, dtype, name, function, bits, D, DV)                                             \
  instantiate_kernel(name "_decode_" #bits "bit_" #D "_" #DV "_" dtype, function, T, bits, D, DV, Phase::decode) \
  instantiate_kernel(name "_prompt_" #bits "bit_" #D "_" #DV "_" dtype, function, T, bits, D, DV, Phase::prompt)
#define instantiate_head(name, function, D, DV)                     \
  instantiate_head_of(float, "float32", name, function, 4, D, DV)   \
  instantiate_head_of(half, "float16", name, function, 4, D, DV)    \
  instantiate_head_of(bfloat, "bfloat16", name, function, 4, D, DV) \
  instantiate_head_of(float, "float32", name, function, 8, D, DV)   \
  instantiate_head_of(half, "float16", name, function, 8, D, DV)    \
  instantiate_head_of(bfloat, "bfloat16", name, function, 8, D, DV)
#define instantiate_heads(name, function)    \
  instantiate_head(name, function, 64, 64)   \
  instantiate_head(name, function, 96, 96)   \
  instantiate_head(name, function, 128, 128) \
  instantiate_head(name, function, 192, 128) \
  instantiate_head(name, function, 192, 192) \
  instantiate_head(name, function, 256, 256)
