// Attention over keys and values of 4 and 8 bits, as mx.quantize packs them: attention/attention.h for each type and
// widths of heads.
#include <metal_stdlib>

#include "attention/packed.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, int bits, int D, int DV, Phase phase>
[[kernel, max_total_threads_per_threadgroup(32 * attention_simdgroups<phase>(D))]] void attention_packed(
    packed_attention_inputs,
    device T* y [[buffer(9)]],               // [batch, heads, queries, DV], or float partial results
    device float* logsumexp [[buffer(10)]],  // [batch, heads, queries]
    constant AttentionParams& params [[buffer(11)]], lane_of_simdgroup,
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  using Shape = AttentionShape<T, D, DV, phase>;
  threadgroup float4 scratch[Shape::scratch];
  threadgroup AttentionRow rows[kQueryRows * Shape::simdgroups];
  const AttentionPlace place = place_of<Shape>(group, lane, simdgroup, simdgroups, params);
  attention<Shape>(
      queries, keys_of<Shape, bits>(keys, key_scales, key_biases, params, place),
      values_of<Shape, bits>(values, value_scales, value_biases, params, place), mask, sinks, y, logsumexp, EveryKey(),
      WholeRows(), params, place, scratch, rows);
}

instantiate_heads("attention", attention_packed)
