// Attention on NVIDIA GPUs, by simdgroups that load ahead: attention/attention.h with 8 or 16 rows of queries. As many keys
// are taken at once as registers have room for.
#include <metal_stdlib>

#include "attention/dense.h"
#include "attention/nvidia/ahead.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, int D, Phase phase, int B, int C>
[[kernel, max_total_threads_per_threadgroup(32 * attention_simdgroups<phase>(D))]] void attention_dense_ahead(
    dense_attention_inputs,
    device T* y [[buffer(5)]],              // [batch, heads, queries, D], or float partial results
    device float* logsumexp [[buffer(6)]],  // [batch, heads, queries]
    constant AttentionParams& params [[buffer(7)]], lane_of_simdgroup, uint simdgroups [[simdgroups_per_threadgroup]]) {
  using Shape = AheadShape<T, D, phase, B, C>;
  threadgroup float4 scratch[Shape::scratch];
  threadgroup AttentionRow rows[Shape::rows * Shape::simdgroups];
  const AttentionPlace place = place_ahead<Shape>(group, lane, simdgroup, simdgroups, params);
  attention_ahead<Shape>(
      queries, keys_of<Shape>(keys, params, place), values_of<Shape>(values, params, place), mask, sinks, y, logsumexp,
      params, place, scratch, rows);
}

#define instantiate_type(T, name, D, blocks8, blocks16)                                                               \
  instantiate_kernel("attention_decode8_" #D "_" #D "_" name, attention_dense_ahead, T, D, Phase::decode, 1, blocks8)    \
  instantiate_kernel("attention_decode16_" #D "_" #D "_" name, attention_dense_ahead, T, D, Phase::decode, 2, blocks16)  \
  instantiate_kernel("attention_prompt16_" #D "_" #D "_" name, attention_dense_ahead, T, D, Phase::prompt, 2, 2)
#define instantiate_width(D, blocks8, blocks16)                                                                       \
  instantiate_kernel("attention_decode8_" #D "_" #D "_float32", attention_dense_ahead, float, D, Phase::decode, 1, 1)  \
  instantiate_type(half, "float16", D, blocks8, blocks16)                                                             \
  instantiate_type(bfloat, "bfloat16", D, blocks8, blocks16)

instantiate_width(64, 2, 2)
instantiate_width(96, 1, 1)
instantiate_width(128, 1, 1)
