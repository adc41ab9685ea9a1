// Keys and values as they are: buffers of the kernels that read them, sources of rows, and the widths of heads.
#pragma once

#include "attention/attention.h"
#include "mittens/source/dense.h"

#define dense_attention_inputs                                                               \
  const device T* queries [[buffer(0)]],    /* [batch, heads, queries, D] */                 \
  const device T* keys [[buffer(1)]],       /* [batch, key_heads, keys, D] */                \
  const device T* values [[buffer(2)]],     /* [batch, key_heads, keys, DV] */               \
  const device T* mask [[buffer(3)]],       /* [batch, heads, queries, keys], or of bools */ \
  const device T* sinks [[buffer(4)]]       /* [heads] */

namespace mittens {

// The runs of a head, from column `column` on.
template <typename T, int E>
inline Dense<T, E> head_of(const device T* elements, constant TokenRows& rows, AttentionPlace place, uint column) {
  constexpr int shift = E == 8 ? 3 : E == 4 ? 2 : E == 2 ? 1 : 0;
  return Dense<T, E>{
      (const device typename Dense<T, E>::Load*)elements,
      uint((TokenRows::at(int64_t(0), rows, place.batch, place.key_head, 0) + column) >> shift),
      uint(rows.token >> shift)};
}

// Elements of a run of `columns` that `lanes` share: 16 bytes at most.
template <typename T>
constexpr int dense_run(int columns, int lanes) {
  return run_size(columns, lanes, 16 / int(sizeof(T)));
}

template <typename Shape, typename T>
inline Dense<T, dense_run<T>(Shape::width, 4)> keys_of(
    const device T* keys, constant AttentionParams& params, AttentionPlace place) {
  return head_of<T, dense_run<T>(Shape::width, 4)>(keys, params.key, place, 0);
}

template <typename Shape, typename T>
inline Dense<T, dense_run<T>(Shape::columns, 8)> values_of(
    const device T* values, constant AttentionParams& params, AttentionPlace place) {
  return head_of<T, dense_run<T>(Shape::columns, 8)>(values, params.value, place, place.slice * Shape::columns);
}

}  // namespace mittens

// Kernels of all widths of heads and types, called <name>_decode_<D>_<DV>_<dtype> and <name>_prompt_<D>_<DV>_<dtype>.
#define instantiate_head_of(T, dtype, name, function, D, DV)                                \
  instantiate_kernel(name "_decode_" #D "_" #DV "_" dtype, function, T, D, DV, Phase::decode) \
  instantiate_kernel(name "_prompt_" #D "_" #DV "_" dtype, function, T, D, DV, Phase::prompt)
#define instantiate_head(name, function, D, DV)                \
  instantiate_head_of(float, "float32", name, function, D, DV) \
  instantiate_head_of(half, "float16", name, function, D, DV)  \
  instantiate_head_of(bfloat, "bfloat16", name, function, D, DV)
#define instantiate_heads(name, function)    \
  instantiate_head(name, function, 32, 32)   \
  instantiate_head(name, function, 48, 48)   \
  instantiate_head(name, function, 64, 64)   \
  instantiate_head(name, function, 72, 72)   \
  instantiate_head(name, function, 80, 80)   \
  instantiate_head(name, function, 96, 64)   \
  instantiate_head(name, function, 96, 96)   \
  instantiate_head(name, function, 112, 112) \
  instantiate_head(name, function, 128, 128) \
  instantiate_head(name, function, 192, 128) \
  instantiate_head(name, function, 192, 192) \
  instantiate_head(name, function, 256, 256) \
  instantiate_head(name, function, 512, 512) \
  instantiate_head(name, function, 576, 512)
