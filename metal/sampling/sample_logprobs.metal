// The logarithmic probabilities of all logits behind sample.metal, for whose rows it also writes the tokens:
//
//   y[r] = x[r] - log(sum_c e^x[r, c])
//
// x and y [rows, columns]. NaN is everywhere in a row that has one, and in one without a logit above -inf, as mx has
// it.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/row_io.h"
#include "sampling/partials.h"

using namespace metal;
using namespace mittens;

// A pack of a row for each thread, and the elements at its ends for the first of them. Each simdgroup combines the
// results of the first launch.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kSampleThreads)]] void sample_logprobs(
    const device T* x [[buffer(0)]],            // [rows, columns]
    const device uint* partials [[buffer(1)]],  // [rows, splits, partial_size]
    device uint* tokens [[buffer(2)]],          // [rows]
    device T* y [[buffer(3)]],                  // [rows, columns]
    constant SampleParams& params [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]], uint3 threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  const uint r = group.x;
  const Whole whole = whole_of<float>(partials + r * params.splits * partial_size, params.splits, lane);
  const float rest = whole.m == INFINITY ? 0.0f : log_of(whole.sum);
  if (group.y == 0 && t == 0) {
    tokens[r] = whole.best.column == no_column ? 0 : whole.best.column;
  }
  const uint first = r * params.columns;
  const RowSpan span = row_span<T>(params.phase + first % pack_size<T>(), params.columns);
  x += first;
  y += first;
  const uint i = group.y * threads.x + t;
  if (i < span.packs) {
    constexpr uint W = pack_size<T>();
    const uint column = span.head + i * W;
    float v[W];
    unpack<T>(load_pack(x + column, true), v);
#pragma unroll
    for (uint j = 0; j < W; ++j) {
      v[j] = (v[j] - whole.m) - rest;
    }
    store_pack(y + column, packs_aligned<T>(first % pack_size<T>(), span), pack<T>(v));
  }
  if (group.y == 0 && t < span.edges) {
    const uint column = edge_column<T>(span, t);
    y[column] = T((float(x[column]) - whole.m) - rest);
  }
}

instantiate_types("sample_logprobs", sample_logprobs)
