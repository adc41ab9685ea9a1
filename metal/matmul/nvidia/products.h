// Products of packed weights with the activations that lanes hold, and their sums over lanes and simdgroups.
#pragma once

#include "matmul/nvidia/activations.h"
#include "mittens/simd_reduce_scatter.h"
#include "params/matmul.h"

namespace mittens {

// sums[m] += x[m, columns of word p] * the word's weights
template <int bits, int V, int M>
inline void add_products(
    thread const Activations<V, M>& a, thread const float (&q)[32 / bits], int p, thread float (&sums)[M]) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int i = 0; i < 32 / bits; ++i) {
      sums[m] += q[i] * a.x[m][p * (32 / bits) + i];
    }
  }
}

// sums[m] = x[m, columns of the lane] * the integers of P words
template <int bits, bool exact, int P, int M>
inline void multiply_words(
    thread const Activations<P * 32 / bits, M>& a, thread const uint (&words)[P], uint two23, thread float (&sums)[M]) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
    sums[m] = a.start[m];
  }
#pragma unroll
  for (int p = 0; p < P; ++p) {
    float q[32 / bits];
    unpack_word<bits, exact>(words[p], two23, q);
    add_products<bits>(a, q, p, sums);
  }
}

template <int C>
inline void clear(thread float (&v)[C]) {
#pragma unroll
  for (int i = 0; i < C; ++i) {
    v[i] = 0;
  }
}

// The products of a simdgroup: partials[r * M + m], set by its first columns, added to by the others.
struct PartialProducts {
  threadgroup float* partials;
  uint lane;
  bool add;
};

// Adds the lanes' totals up and stores them from partial `first` on.
template <int C>
inline void add_totals(thread float (&totals)[C], PartialProducts to, uint first) {
  constexpr int sharing = 32 / C;
  simd_reduce_scatter(totals, to.lane);
  if (to.lane % sharing == 0) {
    threadgroup float& partial = to.partials[first + to.lane / sharing];
    partial = to.add ? partial + totals[0] : totals[0];
  }
}

// Product i, summed over the simdgroups.
inline float sum_of_simdgroups(threadgroup const float* partials, uint i, uint products, uint simdgroups) {
  float sum = 0;
#pragma unroll 1
  for (uint s = 0; s < simdgroups; ++s) {
    sum += partials[s * products + i];
  }
  return sum;
}

}  // namespace mittens
