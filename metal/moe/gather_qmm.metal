// Products of inputs with chosen matrices of a stack of quantized ones, and sums of some of them:
//
//   y[t, m, n] = sum_p weights[p] * (sum_k x[input of p, m, k] * w[matrix of p, n, k] + bias[matrix of p, n])
//
// over the pairs p of t. Without weights that is one pair; with weights a simdgroup has each of at most kMostSummed.
// w = scales * q + biases for each group of k, in modes but affine without biases. NaN where an index is out of range.
// matmul/row_products.h says how; a threadgroup has outputs of one row.
#include <metal_stdlib>

#include "matmul/quantized_rows.h"
#include "matmul/row_products.h"
#include "mittens/instantiate.h"
#include "moe/shared_pairs.h"

using namespace metal;
using namespace mittens;

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(32 * kMostSummed)]] void gather_qmm(
    const device T* x [[buffer(0)]],              // [inputs, rows, columns]
    quantized_matrix(w, 1, 2, 3, ScaleOf<T, F>),  // [matrices, outputs, columns]
    const device T* bias [[buffer(4)]],           // [matrices, outputs]
    const device float* weights [[buffer(5)]],    // [pairs], of T where weights_of_sum says so
    const device uint* matrices [[buffer(6)]],    // [pairs]
    const device uint* inputs [[buffer(7)]],      // [pairs]
    device T* y [[buffer(8)]],                    // [sums, rows, outputs]
    constant GatherQmmParams& params [[buffer(9)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, F == affine_8 ? 8 : 16>;  // fewer columns take fewer registers
  constexpr int R = kRowOutputs;
  threadgroup float partials[kMostSummed * R];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const OwnOutputs outputs = outputs_of<R>(params.weights.outputs, group.x * threads.y + thread_at.y);
  const bool is_sum = params.weights_of_sum != kNoWeights;
  const uint first = group.z * params.pairs_per_sum;
  const Pair each = pair_of(matrices, inputs, params.pairs, first + min(lane, params.pairs_per_sum - 1));
  float sum = not_a_number();
  if (simd_min(uint(each.is_valid)) != 0) {
    const uint p = first + (is_sum ? at.position / 32 : 0);
    const Pair pair = pair_of(matrices, inputs, params.pairs, p);
    const size_t row = size_t(pair.input) * params.weights.rows + group.y;
    const RowsOfX<T> rows = {x + row * params.weights.columns, params.weights.columns, 1};
    const typename Rows::Source matrix[1] = {
        Rows::of(w, w_scales, w_biases, params.weights, pair.matrix).at(outputs.first, outputs.alone)};
    const Sharing in_pair = {is_sum ? lane : at.position, is_sum ? 1 : at.sharers, at.block, lane};
    float addend = 0;
    if (params.weights.has_bias && in_pair.position < R) {
      const uint output = outputs.first + (outputs.alone ? 0 : in_pair.position);
      addend = float(bias[size_t(pair.matrix) * params.weights.outputs + output]);
    }
    float totals[R];
    dot_rows<1, R, 1>(rows, matrix, in_pair, totals);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      totals[r] += int(in_pair.position) == r ? addend : 0.0f;
    }
    if (is_sum) {
      const float weight = weight_of_sum<T>(weights, params.weights_of_sum, p);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        totals[r] *= weight;
      }
    }
    sum = sum_of_sharers(totals, at, partials);
  }
  // Computed again: held across the products, they would need one register more than 1,024 threads leave to each.
  const OwnOutputs written = outputs_of<R>(params.weights.outputs, group.x * threads.y + thread_at.y);
  const uint output = written.first + lane / (32 / R);
  if (writes<R>(at, written, output)) {
    y[(size_t(group.z) * params.weights.rows + group.y) * params.weights.outputs + output] = T(sum);
  }
}

// The same, without weights, where several pairs have one matrix (moe/shared_pairs.h).
template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void gather_qmm_shared(
    const device T* x [[buffer(0)]],  // as of gather_qmm without weights, from here on
    quantized_matrix(w, 1, 2, 3, ScaleOf<T, F>), const device T* bias [[buffer(4)]],
    const device uint* matrices [[buffer(5)]], const device uint* inputs [[buffer(6)]], device T* y [[buffer(7)]],
    constant GatherQmmParams& params [[buffer(8)]], thread_of_plane) {
  threadgroup float partials[kProductSimdgroups * kRowOutputs * kMostShared];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const SharedPairs shared = shared_pairs(matrices, params.weights.matrices, group.z, lane);
  if (shared.count == 0) {
    return;
  }
  // One that is out of range gives NaN, whichever matrix is read.
  const uint index = min(matrices[group.z], params.pairs.matrices - 1);
  const typename QuantizedRows<T, F, 8>::Source matrix[1] = {
      QuantizedRows<T, F, 8>::of(w, w_scales, w_biases, params.weights, index)};
  SharedOperands<T, 1> of = {x, {bias}, matrices, inputs, y, group.y};
  multiply_shared_pairs(of, matrix, index, params, shared, group.x * threads.y + thread_at.y, at, partials);
}

instantiate_common("gather_qmm_shared", gather_qmm_shared)
instantiate_formats("gather_qmm", "", gather_qmm)
