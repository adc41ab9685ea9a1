// Attention over keys and values of 4 and 8 bits, each row of the batch from its own start to its own end:
// attention/attention.h for each type and widths of heads.
#include <metal_stdlib>

#include "attention/packed.h"
#include "attention/ragged.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, int bits, int D, int DV, Phase phase>
[[kernel, max_total_threads_per_threadgroup(32 * attention_simdgroups<phase>(D))]] void attention_packed_ragged(
    packed_attention_inputs,
    const device int* starts [[buffer(9)]],  // [batch] or [batch, queries]
    const device int* ends [[buffer(10)]],   // [batch]
    device T* y [[buffer(11)]],              // [batch, heads, queries, DV], or float partial results
    device float* logsumexp [[buffer(12)]],  // [batch, heads, queries]
    constant RaggedAttentionParams& params [[buffer(13)]], lane_of_simdgroup,
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  using Shape = AttentionShape<T, D, DV, phase>;
  threadgroup float4 scratch[Shape::scratch];
  threadgroup AttentionRow rows[kQueryRows * Shape::simdgroups];
  constant AttentionParams& common = params.attention;
  const AttentionPlace place = place_of<Shape>(group, lane, simdgroup, simdgroups, common);
  attention<Shape>(
      queries, keys_of<Shape, bits>(keys, key_scales, key_biases, common, place),
      values_of<Shape, bits>(values, value_scales, value_biases, common, place), mask, sinks, y, logsumexp,
      row_keys(starts, ends, place, params), WholeRows(), common, place, scratch, rows);
}

instantiate_heads("attention_ragged", attention_packed_ragged)
