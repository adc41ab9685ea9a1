// Attention over keys and values as they are, each row of the batch from its own start to its own end:
// attention/attention.h for each type and width of heads.
#include <metal_stdlib>

#include "attention/dense.h"
#include "attention/ragged.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, int D, int DV, Share share>
[[kernel, max_total_threads_per_threadgroup(32 * attention_simdgroups<share>(D))]] void attention_ragged(
    const device T* queries [[buffer(0)]],    // [batch, heads, queries, D]
    const device T* keys [[buffer(1)]],       // [batch, key_heads, keys, D]
    const device T* values [[buffer(2)]],     // [batch, key_heads, keys, DV]
    const device T* mask [[buffer(3)]],       // [batch, heads, queries, keys], or of bools
    const device T* sinks [[buffer(4)]],      // [heads]
    const device int* starts [[buffer(5)]],   // [batch] or [batch, queries]
    const device int* ends [[buffer(6)]],     // [batch]
    device T* y [[buffer(7)]],                // [batch, heads, queries, DV], or float partial results
    device float* logsumexp [[buffer(8)]],    // [batch, heads, queries]
    constant RaggedAttentionParams& params [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  using Shape = AttentionShape<T, D, DV, share>;
  constexpr int most = 16 / sizeof(T);
  threadgroup float4 scratch[Shape::scratch];
  threadgroup AttentionRow rows[kQueryRows * Shape::simdgroups];
  constant AttentionParams& common = params.attention;
  const AttentionPlace place = place_of<Shape>(group, lane, simdgroup, simdgroups, common);
  attention<Shape>(
      queries, head_of<T, run_size(D, 4, most)>(keys, common.key, place, 0),
      head_of<T, run_size(Shape::columns, 8, most)>(values, common.value, place, place.slice * Shape::columns), mask,
      sinks, y, logsumexp, row_keys(starts, ends, place, params), common, place, scratch, rows);
}

#define instantiate_share(T, name, D, DV)                                                             \
  instantiate_kernel("attention_ragged_decode_" #D "_" #DV "_" name, attention_ragged, T, D, DV, Share::keys) \
  instantiate_kernel("attention_ragged_prompt_" #D "_" #DV "_" name, attention_ragged, T, D, DV, Share::rows)
#define instantiate_widths(D, DV)         \
  instantiate_share(float, "float32", D, DV) \
  instantiate_share(half, "float16", D, DV)  \
  instantiate_share(bfloat, "bfloat16", D, DV)

instantiate_widths(32, 32)
instantiate_widths(48, 48)
instantiate_widths(64, 64)
instantiate_widths(72, 72)
instantiate_widths(80, 80)
instantiate_widths(96, 64)
instantiate_widths(96, 96)
instantiate_widths(112, 112)
instantiate_widths(128, 128)
instantiate_widths(192, 128)
instantiate_widths(192, 192)
instantiate_widths(256, 256)
instantiate_widths(512, 512)
instantiate_widths(576, 512)
