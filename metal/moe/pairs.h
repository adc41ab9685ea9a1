// Pairs of an input and a chosen matrix, from indices that nothing has checked.
#pragma once

#include <metal_stdlib>

#include "params/moe.h"

using namespace metal;

namespace mittens {

struct Pair {
  uint matrix;
  uint input;
  bool is_valid;  // else neither is to be read
};

inline Pair pair_of(const device uint* matrices, const device uint* inputs, constant PairParams& params, uint p) {
  Pair pair;
  pair.matrix = matrices[p];
  pair.input = params.has_inputs ? inputs[p] : p / params.pairs_per_input;
  pair.is_valid = pair.matrix < params.matrices && pair.input < params.inputs;
  return pair;
}

// What a pair gives that is not valid. As bits: compilers may take arithmetic to have no NaN.
inline float not_a_number() {
  return as_type<float>(0x7fc00000u);
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

// The rows of x of M shared pairs (as RowsOfX of matmul/rows.h).
template <typename T, int M>
struct RowsOfPairs {
  using Type = T;
  const device T* x;
  uint first[M];  // element of each pair's row
  uint columns;

  const device T* at(uint m, uint column) const {
    return x + (first[m] + column);
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

}  // namespace mittens
