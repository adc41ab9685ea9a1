// Weighted sums of rows that products have left, the rows of a sum one after another:
//
//   y[t, n] = sum_i weights[t, i] * x[t, i, n]
//
// A thread has a pack of outputs, or one where rows are no whole packs. Sums are in float32, rounded once.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/pack.h"
#include "moe/pairs.h"

using namespace metal;
using namespace mittens;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void row_sums(
    const device T* x [[buffer(0)]],            // [sums, chosen, outputs]
    const device float* weights [[buffer(1)]],  // [sums, chosen], of T where weights_of_sum says so
    device T* y [[buffer(2)]],                  // [sums, outputs]
    constant RowSumsParams& params [[buffer(3)]], uint2 at [[thread_position_in_grid]]) {
  constexpr int W = pack_size<T>();
  const uint output = at.x * (params.packs ? W : 1);
  if (output >= params.outputs) {
    return;
  }
  const size_t first = size_t(at.y) * params.chosen;
  x += size_t(at.y) * params.chosen * params.outputs + output;
  y += size_t(at.y) * params.outputs + output;
  if (params.packs) {
    float sums[W];
#pragma unroll
    for (int i = 0; i < W; ++i) {
      sums[i] = 0;
    }
    for (uint c = 0; c < params.chosen; ++c) {
      const float weight = weight_of_sum<T>(weights, params.weights_of_sum, first + c);
      float terms[W];
      unpack<T>(load_pack(x + size_t(c) * params.outputs, true), terms);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        sums[i] = fma(weight, terms[i], sums[i]);
      }
    }
    store_pack(y, true, pack<T>(sums));
  } else {
    float sum = 0;
    for (uint c = 0; c < params.chosen; ++c) {
      const float weight = weight_of_sum<T>(weights, params.weights_of_sum, first + c);
      sum = fma(weight, float(x[size_t(c) * params.outputs]), sum);
    }
    y[0] = T(sum);
  }
}

instantiate_types("row_sums", row_sums)
