// Attention over keys and values of 4 and 8 bits, each row of the batch from its own start to its own end:
// attention/attention.h for each type and widths of heads.
#include <metal_stdlib>

#include "attention/packed.h"
#include "attention/ragged.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, int bits, int D, int DV, Share share>
[[kernel, max_total_threads_per_threadgroup(32 * attention_simdgroups<share>(D))]] void attention_packed_ragged(
    const device T* queries [[buffer(0)]],         // [batch, heads, queries, D]
    const device uint* keys [[buffer(1)]],         // [batch, key_heads, keys, D * bits / 32]
    const device T* key_scales [[buffer(2)]],      // [batch, key_heads, keys, groups]
    const device T* key_biases [[buffer(3)]],
    const device uint* values [[buffer(4)]],       // [batch, key_heads, keys, DV * bits / 32]
    const device T* value_scales [[buffer(5)]],
    const device T* value_biases [[buffer(6)]],
    const device T* mask [[buffer(7)]],            // [batch, heads, queries, keys], or of bools
    const device T* sinks [[buffer(8)]],           // [heads]
    const device int* starts [[buffer(9)]],        // [batch] or [batch, queries]
    const device int* ends [[buffer(10)]],         // [batch]
    device T* y [[buffer(11)]],                    // [batch, heads, queries, DV], or float partial results
    device float* logsumexp [[buffer(12)]],        // [batch, heads, queries]
    constant RaggedAttentionParams& params [[buffer(13)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  using Shape = AttentionShape<T, D, DV, share>;
  constexpr int most = 128 / bits < 32 ? 128 / bits : 32;  // 16 bytes, and no more than a group
  threadgroup float4 scratch[Shape::scratch];
  threadgroup AttentionRow rows[kQueryRows * Shape::simdgroups];
  constant AttentionParams& common = params.attention;
  const AttentionPlace place = place_of<Shape>(group, lane, simdgroup, simdgroups, common);
  attention<Shape>(
      queries,
      head_of<T, bits, run_size(D, 4, most)>(
          keys, key_scales, key_biases, common.key, common.key_scale, common.key_bias, common.group_shift, place),
      head_of<T, bits, run_size(DV, 8, most)>(
          values, value_scales, value_biases, common.value, common.value_scale, common.value_bias, common.group_shift,
          place),
      mask, sinks, y, logsumexp, row_keys(starts, ends, place, params), common, place, scratch, rows);
}

#define instantiate_share(T, name, bits, D, DV)                                                                        \
  instantiate_kernel("attention_ragged_decode_" #bits "bit_" #D "_" #DV "_" name, attention_packed_ragged, T, bits, D, DV, Share::keys) \
  instantiate_kernel("attention_ragged_prompt_" #bits "bit_" #D "_" #DV "_" name, attention_packed_ragged, T, bits, D, DV, Share::rows)
#define instantiate_widths(D, DV)                 \
  instantiate_share(float, "float32", 4, D, DV)   \
  instantiate_share(half, "float16", 4, D, DV)    \
  instantiate_share(bfloat, "bfloat16", 4, D, DV) \
  instantiate_share(float, "float32", 8, D, DV)   \
  instantiate_share(half, "float16", 8, D, DV)    \
  instantiate_share(bfloat, "bfloat16", 8, D, DV)

instantiate_widths(64, 64)
instantiate_widths(96, 96)
instantiate_widths(128, 128)
instantiate_widths(192, 128)
instantiate_widths(192, 192)
instantiate_widths(256, 256)
