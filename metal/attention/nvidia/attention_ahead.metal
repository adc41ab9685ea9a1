// Attention on NVIDIA GPUs, by simdgroups that load ahead: attention/attention.h with 8 or 16 rows of queries. As many keys
// are taken at once as registers have room for.
#include <metal_stdlib>

#include "attention/dense.h"
#include "attention/nvidia/ahead.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, int D, Share share, int B, int C>
[[kernel, max_total_threads_per_threadgroup(32 * attention_simdgroups<share>(D))]] void attention_dense_ahead(
    const device T* queries [[buffer(0)]],    // [batch, heads, queries, D]
    const device T* keys [[buffer(1)]],       // [batch, key_heads, keys, D]
    const device T* values [[buffer(2)]],     // [batch, key_heads, keys, D]
    const device T* mask [[buffer(3)]],       // [batch, heads, queries, keys], or of bools
    const device T* sinks [[buffer(4)]],      // [heads]
    device T* y [[buffer(5)]],                // [batch, heads, queries, D], or float partial results
    device float* logsumexp [[buffer(6)]],    // [batch, heads, queries]
    constant AttentionParams& params [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  using Shape = AheadShape<T, D, share, B, C>;
  constexpr int most = 16 / sizeof(T);
  threadgroup float4 scratch[Shape::scratch];
  threadgroup AttentionRow rows[Shape::rows * Shape::simdgroups];
  const AttentionPlace place = place_ahead<Shape>(group, lane, simdgroup, simdgroups, params);
  attention_ahead<Shape>(
      queries, head_of<T, run_size(D, 4, most)>(keys, params.key, place, 0),
      head_of<T, run_size(D, 8, most)>(values, params.value, place, 0), mask,
      sinks, y, logsumexp, params, place, scratch, rows);
}

#define instantiate_type(T, name, D, blocks8, blocks16)                                                               \
  instantiate_kernel("attention_decode8_" #D "_" #D "_" name, attention_dense_ahead, T, D, Share::keys, 1, blocks8)    \
  instantiate_kernel("attention_decode16_" #D "_" #D "_" name, attention_dense_ahead, T, D, Share::keys, 2, blocks16)  \
  instantiate_kernel("attention_prompt16_" #D "_" #D "_" name, attention_dense_ahead, T, D, Share::rows, 2, 2)
#define instantiate_width(D, blocks8, blocks16)                                                                       \
  instantiate_kernel("attention_decode8_" #D "_" #D "_float32", attention_dense_ahead, float, D, Share::keys, 1, 1)  \
  instantiate_type(half, "float16", D, blocks8, blocks16)                                                             \
  instantiate_type(bfloat, "bfloat16", D, blocks8, blocks16)

instantiate_width(64, 2, 2)
instantiate_width(96, 1, 1)
instantiate_width(128, 1, 1)
