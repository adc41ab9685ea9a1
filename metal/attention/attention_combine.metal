// The second kernel of attention whose threadgroups share the keys of a row. It adds up their parts
// (attention/combine.h).
#include <metal_stdlib>

#include "attention/combine.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, uint simdgroups>
[[kernel, max_total_threads_per_threadgroup(32 * simdgroups)]] void attention_combine(
    const device float* partials [[buffer(0)]],  // sums [splits, rows, width], maxima and totals [rows, splits]
    device T* y [[buffer(1)]],                   // [rows, width]
    device float* logsumexp [[buffer(2)]],       // [rows]
    constant AttentionCombineParams& params [[buffer(3)]], uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 scratch[simdgroups * quads];
  const uint row = group.x;
  const uint quad = group.y * quads + t % quads;
  const RowParts parts = row_parts(partials, row, params.rows, params.splits, params.width, quad);
  const SoftmaxState<float> all =
      combine<simdgroups, T>(parts, y + size_t(row) * params.width, quad, params.width / 4, scratch, t, lane);
  if (t == 0 && group.y == 0 && params.has_logsumexp) {
    logsumexp[row] = logsumexp_of<T>(all.m, all.l);
  }
}

instantiate_kernel("attention_combine_1_float32", attention_combine, float, 1)
instantiate_kernel("attention_combine_1_float16", attention_combine, half, 1)
instantiate_kernel("attention_combine_1_bfloat16", attention_combine, bfloat, 1)
instantiate_kernel("attention_combine_8_float32", attention_combine, float, 8)
instantiate_kernel("attention_combine_8_float16", attention_combine, half, 8)
instantiate_kernel("attention_combine_8_bfloat16", attention_combine, bfloat, 8)
