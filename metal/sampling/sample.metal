// Tokens drawn from logits:
//
//   token[r] = argmax_c x[r, c] / temperature + g[r, c]   over the c that are kept
//
// x [rows, columns]; g = -log(-log(u)) of the uniform numbers u that mx.random draws for an array of x's shape. Greedy
// sampling has no g. Of equal sums the first counts; NaN counts as -inf, and a row of nothing else gives token 0.
//
// Kept are the logits that pass all of
//   top-p: x >= the largest v with sum_{x >= v} p(x) >= top_p, p the softmax of the row
//   min-p: x >= max(x) + log(min_p), rounded to the type
//   top-k: the k largest, of equal ones the first
//
// Nothing is sorted. A threadgroup takes a row. It reads the row for the largest logit of each thread, and for the sum
// of the exponentials where these are needed. The threshold of top-k or top-p among the maxima of the threads bounds
// the row's from below; the logits from there on, mostly few, go to threadgroup memory, and bisection over the bits of
// a logit finds the threshold among them. Where they do not fit, it bisects over the row itself. Exponentials are whole
// numbers in units of 2^-44, so that the kept set does not depend on the order of sums.
//
// Without filters several threadgroups may share a row; sample_combine combines their results. So does sample_logprobs,
// which also normalizes all logits: y = x - log(sum(e^x)), NaN in a row that has one.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "sampling/sample_row.h"

using namespace metal;
using namespace mittens;

template <typename T>
[[kernel, threads_at_most(sample_threads, 768)]] void sample(
    const device T* x [[buffer(0)]],       // [rows, columns]
    const device uint* key [[buffer(1)]],  // [2]
    device uint* tokens [[buffer(2)]],     // [rows]
    device float* logprobs [[buffer(3)]],  // [rows]
    device uint* partials [[buffer(4)]],   // [rows, splits, partial_size], for another launch
    constant SampleParams& params [[buffer(5)]], uint group [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float values[list_size];
  threadgroup uint columns[list_size];
  threadgroup uint scratch[2 * 3 * 32];
  threadgroup atomic_uint count;
  sample_row(
      x, key, tokens, logprobs, partials, params, group, t, threads, lane, simdgroup, values, columns, scratch, &count);
}

// One simdgroup for each row.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(32)]] void sample_combine(
    const device uint* partials [[buffer(0)]],  // [rows, splits, partial_size]
    device uint* tokens [[buffer(1)]],          // [rows]
    device float* logprobs [[buffer(2)]],       // [rows]
    constant SampleParams& params [[buffer(3)]], uint r [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  const Whole whole = whole_of<T>(partials + r * params.splits * partial_size, params.splits, lane);
  if (lane == 0) {
    tokens[r] = whole.best.column == no_column ? 0 : whole.best.column;
    if (params.logprobs == kTokenLogprobs) {
      logprobs[r] = (whole.logit - whole.m) - log_of(whole.sum);
    }
  }
}

instantiate_types("sample", sample)
instantiate_kernel("sample_combine", sample_combine, float)
