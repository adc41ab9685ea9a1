// Products of inputs with chosen matrices of a stack of affine quantized ones:
//
//   y[p, m, n] = sum_k x[input of p, m, k] * w[matrix of p, n, k],   w = scales * q + biases for each group of k
//
// NaN where an index is out of range. matmul/rows.h says how; a threadgroup has outputs of one row of a pair.
#include <metal_stdlib>

#include "matmul/quantized_rows.h"
#include "matmul/rows.h"
#include "mittens/instantiate.h"
#include "moe/pairs.h"

using namespace metal;
using namespace mittens;

template <typename T, int bits>
[[kernel, max_total_threads_per_threadgroup(256)]] void gather_qmm(
    const device T* x [[buffer(0)]],       // [inputs, rows, columns]
    const device uint* w [[buffer(1)]],    // [matrices, outputs, columns * bits / 32]
    const device T* scales [[buffer(2)]],  // [matrices, outputs, columns / group]
    const device T* biases [[buffer(3)]],
    const device uint* matrices [[buffer(4)]],  // [pairs]
    const device uint* inputs [[buffer(5)]],    // [pairs]
    device T* y [[buffer(6)]],                  // [pairs, rows, outputs]
    constant GatherQmmParams& params [[buffer(7)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 thread_at [[thread_position_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int R = kRowOutputs;
  threadgroup float partials[kProductSimdgroups * R];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const OwnOutputs outputs = outputs_of<R>(params.weights.outputs, group.x * threads.y + thread_at.y);
  const Pair pair = pair_of(matrices, inputs, params.pairs, group.z);
  float sum = not_a_number();
  if (pair.is_valid) {
    const size_t row = size_t(pair.input) * params.weights.rows + group.y;
    const RowsOfX<T> rows = {x + row * params.weights.columns, params.weights.columns, 1};
    const AffineRows<T, bits, run_columns(1)> matrix[1] = {
        affine_rows<bits, run_columns(1)>(w, scales, biases, params.weights, pair.matrix)
            .at(outputs.first, outputs.alone)};
    float totals[R];
    multiply_rows<1, R, 1>(rows, matrix, at, totals);
    sum = sum_of_sharers(totals, at, partials);
  }
  const uint output = outputs.first + lane / (32 / R);
  if (writes<R>(at) && output >= outputs.own && (!outputs.alone || output == outputs.first)) {
    y[(size_t(group.z) * params.weights.rows + group.y) * params.weights.outputs + output] = T(sum);
  }
}

instantiate_types("gather_qmm_4bit", gather_qmm, 4)
instantiate_types("gather_qmm_8bit", gather_qmm, 8)
