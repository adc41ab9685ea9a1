// Tokens drawn from logits with penalties and a mask: adjust.h says how these change logits, sample.metal how tokens
// are drawn.
//
// A threadgroup adjusts its part of a row in memory of its own, and draws from there. The launches after it read the
// adjusted logits too.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "sampling/adjust.h"
#include "sampling/sample_row.h"

using namespace metal;
using namespace mittens;

template <typename T>
[[kernel, threads_at_most(sample_threads, 768)]] void sample_adjusted(
    const device T* x [[buffer(0)]],               // [rows, columns]
    const device uint* key [[buffer(1)]],          // [2]
    device uint* tokens [[buffer(2)]],             // [rows]
    device float* logprobs [[buffer(3)]],          // [rows]
    device uint* partials [[buffer(4)]],           // [rows, splits, partial_size], for another launch
    device T* adjusted [[buffer(5)]],              // [rows, columns]
    device atomic_uint* counts [[buffer(6)]],      // [rows, columns]
    const device uint* seen [[buffer(7)]],         // [rows or 1, tokens], of one or two words
    const device uint* mask [[buffer(8)]],         // [rows or 1, words]
    const device float* repetition [[buffer(9)]],  // [rows or 1]
    const device float* presence [[buffer(10)]],   // [rows or 1]
    const device float* frequency [[buffer(11)]],  // [rows or 1]
    constant AdjustedSampleParams& params [[buffer(12)]], uint group [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float values[list_size];
  threadgroup uint columns[list_size];
  threadgroup uint scratch[2 * 3 * 32];
  threadgroup atomic_uint count;
  const Adjustments given{seen, mask, repetition, presence, frequency};
  const uint splits = params.sample.splits;
  adjust_row(x, adjusted, counts, given, params.adjust, group / splits, group % splits, t, threads);
  sample_row<T>(
      adjusted, key, tokens, logprobs, partials, params.sample, group, t, threads, lane, simdgroup, values, columns,
      scratch, &count);
}

instantiate_types("sample_adjusted", sample_adjusted)
