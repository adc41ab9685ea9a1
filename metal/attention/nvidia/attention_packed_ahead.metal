// Attention over packed keys and values on NVIDIA GPUs, by simdgroups that load ahead: attention/attention.h with 8 or 16
// rows of queries.
#include <metal_stdlib>

#include "attention/nvidia/packed_pairs.h"
#include "attention/nvidia/ahead.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, int bits, int D, Phase phase, int B, int C>
[[kernel, max_total_threads_per_threadgroup(32 * attention_simdgroups<phase>(D))]] void attention_packed_ahead(
    packed_attention_inputs,
    device T* y [[buffer(9)]],               // [batch, heads, queries, D], or float partial results
    device float* logsumexp [[buffer(10)]],  // [batch, heads, queries]
    constant AttentionParams& params [[buffer(11)]], lane_of_simdgroup,
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  using Shape = AheadShape<T, D, phase, B, C>;
  threadgroup float4 scratch[Shape::scratch];
  threadgroup AttentionRow rows[Shape::rows * Shape::simdgroups];
  const AttentionPlace place = place_ahead<Shape>(group, lane, simdgroup, simdgroups, params);
  attention_ahead<Shape>(
      queries, pairs_of(keys_of<Shape, bits>(keys, key_scales, key_biases, params, place)),
      pairs_of(values_of<Shape, bits>(values, value_scales, value_biases, params, place)), mask, sinks, y, logsumexp,
      params, place, scratch, rows);
}

#define instantiate_type(T, name, bits, D, blocks16)                                                                 \
  instantiate_kernel(                                                                                            \
      "attention_decode8_" #bits "bit_" #D "_" #D "_" name, attention_packed_ahead, T, bits, D, Phase::decode, 1, 2)  \
  instantiate_kernel(                                                                                            \
      "attention_decode16_" #bits "bit_" #D "_" #D "_" name, attention_packed_ahead, T, bits, D, Phase::decode, 2, blocks16) \
  instantiate_kernel(                                                                                            \
      "attention_prompt16_" #bits "bit_" #D "_" #D "_" name, attention_packed_ahead, T, bits, D, Phase::prompt, 2, 2)
#define instantiate_width(D, blocks16)               \
  instantiate_type(half, "float16", 4, D, blocks16)    \
  instantiate_type(bfloat, "bfloat16", 4, D, blocks16) \
  instantiate_type(half, "float16", 8, D, blocks16)    \
  instantiate_type(bfloat, "bfloat16", 8, D, blocks16)

instantiate_width(64, 2)
instantiate_width(96, 1)
instantiate_width(128, 1)
