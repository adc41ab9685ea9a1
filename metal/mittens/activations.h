// The columns of x that one lane multiplies weights with, held as floats while the rows of weights pass by.
#pragma once

#include "mittens/dequantize.h"
#include "mittens/vector.h"

namespace mittens {

// V columns of M rows of x, each times its activation_scale; their plain sums; and what a sum of products starts
// from, to make up for what unpack_word leaves in the weights.
template <int V, int M>
struct Activations {
  float x[M][V];
  float sum[M];
  float start[M];
};

// x [rows, columns], 16-byte aligned with a whole number of packs in V columns; rows past the last repeat it.
template <typename T, Format F, bool exact, int V, int M>
inline void load_activations(
    const device T* x, uint rows, uint columns, uint column, thread Activations<V, M>& a) {
  constexpr int W = pack_size<T>();
  constexpr int N = word_size<F>();
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const device T* row = x + min(uint(m), rows - 1) * columns + column;
    a.sum[m] = 0;
#pragma unroll
    for (int i = 0; i < V; i += W) {
      float v[W];
      unpack<T>(load_pack(row + i, true), v);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        a.x[m][i + j] = v[j];
        a.sum[m] += v[j];
      }
    }
    a.start[m] = 0;
#pragma unroll
    for (int p = 0; p < V / N; ++p) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        a.x[m][packed_column<F>(p, i)] *= activation_scale<F>(i);
        a.start[m] -= remainder_of<F, exact>(i) * a.x[m][packed_column<F>(p, i)];
      }
    }
  }
}

}  // namespace mittens
