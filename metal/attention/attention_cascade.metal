// The last kernel of attention whose sequences share their first keys. It adds up the parts that one launch left of the
// prefix, for the rows of all sequences, and another of each sequence's own keys (attention/combine.h).
#include <metal_stdlib>

#include "attention/combine.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

// The parts of the prefix, then the row's own.
struct CascadeParts {
  RowParts prefix;
  RowParts own;
  uint count;

  float4 sum(uint s) const {
    return s < prefix.count ? prefix.sum(s) : own.sum(s - prefix.count);
  }
  float maximum(uint s) const {
    return s < prefix.count ? prefix.maximum(s) : own.maximum(s - prefix.count);
  }
  float total(uint s) const {
    return s < prefix.count ? prefix.total(s) : own.total(s - prefix.count);
  }
};

template <typename T, uint simdgroups>
[[kernel, max_total_threads_per_threadgroup(32 * simdgroups)]] void attention_cascade(
    const device float* prefix [[buffer(0)]],  // rows [heads, batch, queries], as attention_combine.metal has them
    const device float* own [[buffer(1)]],     // rows [batch, heads, queries], likewise
    device T* y [[buffer(2)]],                 // [batch, heads, queries, width]
    constant AttentionCascadeParams& params [[buffer(3)]], uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 scratch[simdgroups * quads];
  const uint row = group.x;
  const uint head = row / params.queries % params.heads;
  const uint batch = row / params.queries / params.heads;
  const uint shared_row = (head * params.batches + batch) * params.queries + row % params.queries;
  const uint rows = params.batches * params.heads * params.queries;
  const uint quad = group.y * quads + t % quads;
  const CascadeParts parts = {
      row_parts(prefix, shared_row, rows, params.prefix_splits, params.width, quad),
      row_parts(own, row, rows, params.own_splits, params.width, quad), params.prefix_splits + params.own_splits};
  combine<simdgroups, T>(parts, y + size_t(row) * params.width, quad, params.width / 4, scratch, t, lane);
}

instantiate_kernel("attention_cascade_1_float32", attention_cascade, float, 1)
instantiate_kernel("attention_cascade_1_float16", attention_cascade, half, 1)
instantiate_kernel("attention_cascade_1_bfloat16", attention_cascade, bfloat, 1)
instantiate_kernel("attention_cascade_8_float32", attention_cascade, float, 8)
instantiate_kernel("attention_cascade_8_float16", attention_cascade, half, 8)
instantiate_kernel("attention_cascade_8_bfloat16", attention_cascade, bfloat, 8)
