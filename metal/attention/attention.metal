// Attention over keys and values as they are: attention/attention.h for each type and width of heads.
#include <metal_stdlib>

#include "attention/dense.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, int D, int DV, Phase phase>
[[kernel, max_total_threads_per_threadgroup(32 * attention_simdgroups<phase>(D))]] void attention_dense(
    dense_attention_inputs,
    device T* y [[buffer(5)]],              // [batch, heads, queries, DV], or float partial results
    device float* logsumexp [[buffer(6)]],  // [batch, heads, queries]
    constant AttentionParams& params [[buffer(7)]], lane_of_simdgroup, uint simdgroups [[simdgroups_per_threadgroup]]) {
  using Shape = AttentionShape<T, D, DV, phase>;
  threadgroup float4 scratch[Shape::scratch];
  threadgroup AttentionRow rows[kQueryRows * Shape::simdgroups];
  const AttentionPlace place = place_of<Shape>(group, lane, simdgroup, simdgroups, params);
  attention<Shape>(
      queries, keys_of<Shape>(keys, params, place), values_of<Shape>(values, params, place), mask, sinks, y, logsumexp,
      EveryKey(), WholeRows(), params, place, scratch, rows);
}

instantiate_heads("attention", attention_dense)
