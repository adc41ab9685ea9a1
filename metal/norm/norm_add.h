// The first half of norm_add_norm (norm/norm_add_norm.metal).
#pragma once

#include "norm/rms_norm.h"

namespace mittens {

// The residual plus the norm of the first input.
template <typename T>
struct NormAdd {
  using Element = T;
  using Stat = float;  // sum of squares
  using Row = float;   // m
  enum { inputs = 2, weights = 1, reduces = 1, numbers = 1 };
  static constant constexpr float fill = 0;
  RowInput<T> rows[2];
  WeightInput<T> columns[1];
  RowOutput<T> y;
  float eps;
  float weight_offset;

  Stat none() const {
    return 0;
  }
  template <int N>
  Stat of(thread const RowParts<T, 2, N>& parts, RowBatch) const {
    return square_sum(parts.packs[0], parts.edges[0]);
  }
  Row done(Stat sum, uint columns_of_row) const {
    return rstd(sum, columns_of_row, eps);
  }
  template <int W>
  void write(thread float (&v)[2][W], thread const float (&w)[1][W], Row m) const {
    normalize<T>(v[0], m, columns[0].present, w[0], weight_offset);
    round_values<T>(v[0]);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      v[0][i] += v[1][i];
    }
  }
};

}  // namespace mittens
