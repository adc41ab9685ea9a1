// Attention over keys and values as they are, each row of the batch from its own start to its own end:
// attention/attention.h for each type and width of heads.
#include <metal_stdlib>

#include "attention/dense.h"
#include "attention/ragged.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, int D, int DV, Phase phase>
[[kernel, max_total_threads_per_threadgroup(32 * attention_simdgroups<phase>(D))]] void attention_ragged(
    dense_attention_inputs,
    const device int* starts [[buffer(5)]],  // [batch] or [batch, queries]
    const device int* ends [[buffer(6)]],    // [batch]
    device T* y [[buffer(7)]],               // [batch, heads, queries, DV], or float partial results
    device float* logsumexp [[buffer(8)]],   // [batch, heads, queries]
    constant RaggedAttentionParams& params [[buffer(9)]], lane_of_simdgroup,
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  using Shape = AttentionShape<T, D, DV, phase>;
  threadgroup float4 scratch[Shape::scratch];
  threadgroup AttentionRow rows[kQueryRows * Shape::simdgroups];
  constant AttentionParams& common = params.attention;
  const AttentionPlace place = place_of<Shape>(group, lane, simdgroup, simdgroups, common);
  attention<Shape>(
      queries, keys_of<Shape>(keys, common, place), values_of<Shape>(values, common, place), mask, sinks, y, logsumexp,
      row_keys(starts, ends, place, params), WholeRows(), common, place, scratch, rows);
}

instantiate_heads("attention_ragged", attention_ragged)
