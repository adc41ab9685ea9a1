// The op of rms_norm, and of what ends in one: y = T(x n) weight, n = 1 / sqrt(mean(x^2) + eps).
#pragma once

#include "mittens/rms.h"
#include "mittens/row_op.h"

namespace mittens {

template <typename T>
struct RmsNorm {
  using Element = T;
  using Stat = float;  // sum of squares
  using Row = float;   // n
  enum { inputs = 1, weights = 1, reduces = 1, numbers = 1 };
  RowInput<T> rows[1];
  WeightInput<T> columns[1];
  RowOutput<T> y;
  float eps;

  float fill() const {
    return 0;
  }
  Stat none() const {
    return 0;
  }
  template <int N>
  Stat of(thread const RowParts<T, 1, N>& x, RowBatch) const {
    float sum = float(x.edges[0]) * float(x.edges[0]);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float v[16 / sizeof(T)];
      unpack<T>(x.packs[0][i], v);
#pragma unroll
      for (int j = 0; j < pack_size<T>(); ++j) {
        sum += v[j] * v[j];
      }
    }
    return sum;
  }
  Stat merge(Stat a, Stat b) const {
    return a + b;
  }
  template <int L>
  Stat across(Stat own, uint, float) const {
    return lanes_sum<L>(own);
  }
  Row done(Stat sum, uint columns_of_row) const {
    return rstd(sum, columns_of_row, eps);
  }
  // x * n is rounded to T before the weight is applied, as mx does.
  template <int W>
  void write(thread float (&v)[1][W], thread const float (&w)[1][W], Row n) const {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      v[0][i] *= n;
    }
    if (columns[0].present) {
      round_values<T>(v[0]);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        v[0][i] *= w[0][i];
      }
    }
  }
};

}  // namespace mittens
