// Products of the pairs of an input and a chosen matrix that have the same matrix (moe/pairs.h): of up to kMostShared
// such pairs, one threadgroup reads the matrix. A pair gives the same whichever it shares with.
#pragma once

#include "matmul/row_products.h"
#include "moe/pairs.h"

namespace mittens {

// The bias that a thread adds to its sums of gate and up, R each: one of them, where there are any.
template <int R, typename T>
inline float gated_addend(
    const device T* gate_bias, const device T* up_bias, uint expert, bool is_expert, constant QuantizedParams& params,
    OwnOutputs outputs, uint position) {
  float addend = 0;
  if (params.has_bias && is_expert && position < 2 * R) {
    const uint output = outputs.first + (outputs.alone ? 0 : position % R);
    const device T* bias = position < R ? gate_bias : up_bias;
    addend = float(bias[size_t(expert) * params.outputs + output]);
  }
  return addend;
}

// The gated product: sums of gate are in the lower half of the lanes, of up in the upper half.
inline float gated_product(float sum, uint lane, constant GatherQmmParams& params) {
  // Comparisons, which leave a NaN as it is.
  sum = sum > params.limit ? params.limit : sum;
  sum = lane >= 16 && sum < -params.limit ? -params.limit : sum;
  const float linear = simd_shuffle_xor(sum, ushort(16)) + params.offset;
  return activate(sum, params.weights.gate_alpha, params.weights.gate_beta) * linear;
}

enum { kMostShared = 4 };  // pairs of one matrix that a threadgroup takes

// The pairs that a threadgroup takes of those with the matrix of its own.
struct SharedPairs {
  uint pairs[kMostShared];  // repeats the last
  uint count;               // 0: another threadgroup takes its own
};

// Of the pairs of a matrix the first, and each that is a multiple of kMostShared after it, takes the next ones too.
inline SharedPairs shared_pairs(const device uint* matrices, uint pairs, uint p, uint lane) {
  const uint matrix = matrices[p];
  uint before = 0;
  for (uint q = lane; q < p; q += 32) {
    before += matrices[q] == matrix ? 1 : 0;
  }
  SharedPairs shared;
  shared.pairs[0] = p;
  shared.count = simd_sum(before) % kMostShared == 0 ? 1 : 0;
#pragma unroll
  for (int m = 1; m < kMostShared; ++m) {
    uint next = pairs;
    for (uint q = shared.pairs[m - 1] + 1 + lane; q < pairs && next == pairs; q += 32) {
      next = matrices[q] == matrix ? q : pairs;
    }
    next = simd_min(next);
    const bool found = next < pairs;
    shared.pairs[m] = found ? next : shared.pairs[m - 1];
    shared.count += found && shared.count > 0 ? 1 : 0;
  }
  return shared;
}

// The rows of x of M shared pairs (as RowsOfX of matmul/row_products.h).
template <typename T, int M>
struct RowsOfPairs {
  using Type = T;
  using Element = T;
  using Activation = typename ActivationOf<T>::type;
  const device T* x;
  uint first[M];  // element of each pair's row
  uint columns;

  uint offset(int m, uint column, uint) const {
    return first[m] + column;
  }
};

// A row of results that a lane may write, one of M shared pairs.
struct OwnRow {
  size_t row;     // of y
  bool is_valid;  // else it is NaN
  bool is_own;    // else it repeats the last pair's
};

// The rows of x, and the row of y of a lane that gets the sum of pair m. Of a pair that is out of range the first input
// is read.
template <typename T, int M>
inline OwnRow rows_of_pairs(
    const device T* x, const device uint* matrices, const device uint* inputs, constant GatherQmmParams& params,
    SharedPairs shared, uint row, uint m, thread RowsOfPairs<T, M>& rows) {
  rows.x = x;
  rows.columns = params.weights.columns;
  OwnRow own;
#pragma unroll
  for (uint i = 0; i < M; ++i) {
    const Pair pair = pair_of(matrices, inputs, params.pairs, shared.pairs[i]);
    rows.first[i] = ((pair.is_valid ? pair.input : 0) * params.weights.rows + row) * rows.columns;
    own.row = i <= m ? size_t(shared.pairs[i]) * params.weights.rows + row : own.row;
    own.is_valid = i <= m ? pair.is_valid : own.is_valid;
  }
  own.is_own = m < shared.count;
  return own;
}

// The arrays of a launch over shared pairs: it writes the product of one matrix, or the gated one of two.
template <typename T, int N>
struct SharedOperands {
  const device T* x;
  const device T* bias[N];
  const device uint* matrices;
  const device uint* inputs;
  device T* y;
  uint row;  // of each input
};

template <int M, typename T, int N, typename Source>
inline void multiply_shared(
    thread const SharedOperands<T, N>& of, thread const Source (&w)[N], constant GatherQmmParams& params,
    SharedPairs shared, OwnOutputs outputs, Sharing at, threadgroup float* partials) {
  constexpr int R = kRowOutputs / N;
  constexpr int C = N * R * M;
  RowsOfPairs<T, M> rows;
  const OwnRow own =
      rows_of_pairs<T, M>(of.x, of.matrices, of.inputs, params, shared, of.row, at.lane / (32 / C) % M, rows);
  float totals[C];
  dot_rows<N, R, M>(rows, w, at, totals);
  float sum = sum_of_sharers(totals, at, partials);
  const uint output = outputs.first + at.lane / (32 / N / R) % R;
  if constexpr (N == 2) {  // the upper half of the lanes has the sums of up
    if (params.weights.has_bias) {
      sum += float(of.bias[at.lane < 16 ? 0 : 1][outputs.alone ? outputs.first : output]);
    }
    sum = gated_product(sum, at.lane, params);
  }
  if (writes<C>(at, outputs, output) && (N == 1 || at.lane < 16) && own.is_own) {
    if (N == 1 && params.weights.has_bias) {
      sum += float(of.bias[0][output]);
    }
    of.y[own.row * params.weights.outputs + output] = T(own.is_valid ? sum : not_a_number());
  }
}

// w: matrix `index` of each of the N stacks. All threads of a threadgroup, which has the pairs of pair p's matrix.
template <typename T, int N, typename Source>
inline void multiply_shared_pairs(
    thread SharedOperands<T, N>& of, thread const Source (&w)[N], uint index, constant GatherQmmParams& params,
    SharedPairs shared, uint block, Sharing at, threadgroup float* partials) {
  const OwnOutputs outputs = outputs_of<kRowOutputs / N>(params.weights.outputs, block);
  Source own[N];
#pragma unroll
  for (int s = 0; s < N; ++s) {
    own[s] = w[s].at(outputs.first, outputs.alone);
    of.bias[s] += params.weights.has_bias ? size_t(index) * params.weights.outputs : 0;
  }
  if (shared.count == 1) {
    multiply_shared<1>(of, own, params, shared, outputs, at, partials);
  } else if (shared.count == 2) {
    multiply_shared<2>(of, own, params, shared, outputs, at, partials);
  } else {
    multiply_shared<4>(of, own, params, shared, outputs, at, partials);
  }
}

}  // namespace mittens
