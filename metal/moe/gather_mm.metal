// Products of inputs with chosen matrices of a stack of dense ones:
//
//   y[p, m, n] = sum_k x[input of p, m, k] * w[matrix of p, n, k]
//
// NaN where an index is out of range. A simdgroup has kGatherOutputs outputs of one row of a pair; its lanes share out
// the columns, a pack each at a time, or single elements where rows are no whole packs.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/pack.h"
#include "moe/pairs.h"

using namespace metal;
using namespace mittens;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void gather_mm(
    const device T* x [[buffer(0)]],            // [inputs, rows, columns]
    const device T* w [[buffer(1)]],            // [matrices, outputs, columns]
    const device uint* matrices [[buffer(2)]],  // [pairs]
    const device uint* inputs [[buffer(3)]],    // [pairs]
    device T* y [[buffer(4)]],                  // [pairs, rows, outputs]
    constant GatherMmParams& params [[buffer(5)]], lane_of_simdgroup, uint simdgroups [[simdgroups_per_threadgroup]]) {
  constexpr int R = kGatherOutputs;
  constexpr int W = pack_size<T>();
  const uint first = (group.x * simdgroups + simdgroup) * R;
  if (first >= params.outputs) {
    return;
  }
  const Pair pair = pair_of(matrices, inputs, params.pairs, group.z);
  float sums[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    sums[r] = pair.is_valid ? 0.0f : not_a_number();
  }
  if (pair.is_valid) {
    x += (size_t(pair.input) * params.rows + group.y) * params.columns;
    w += int64_t(pair.matrix) * params.matrix_stride;
    const device T* at[R];  // outputs past the last repeat it
#pragma unroll
    for (int r = 0; r < R; ++r) {
      at[r] = w + size_t(min(first + r, params.outputs - 1)) * params.row_stride;
    }
    if (params.packs) {
      for (uint column = lane * W; column < params.columns; column += 32 * W) {
        float activations[W];
        unpack<T>(load_pack(x + column, true), activations);
#pragma unroll
        for (int r = 0; r < R; ++r) {
          float weights[W];
          unpack<T>(load_pack(at[r] + column, true), weights);
#pragma unroll
          for (int i = 0; i < W; ++i) {
            sums[r] = fma(weights[i], activations[i], sums[r]);
          }
        }
      }
    } else {
      for (uint column = lane; column < params.columns; column += 32) {
        const float activation = float(x[column]);
#pragma unroll
        for (int r = 0; r < R; ++r) {
          sums[r] = fma(float(at[r][column]), activation, sums[r]);
        }
      }
    }
  }
  y += (size_t(group.z) * params.rows + group.y) * params.outputs + first;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float sum = simd_sum(sums[r]);
    if (int(lane) == r && first + r < params.outputs) {
      y[r] = T(sum);
    }
  }
}

instantiate_types("gather_mm", gather_mm)
