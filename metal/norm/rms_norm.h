// The op of rms_norm, and of ops that end in one: y = T(x n) (weight + offset), n = 1 / sqrt(mean(x^2) + eps).
#pragma once

#include "mittens/rms.h"
#include "mittens/row_op.h"

namespace mittens {

// Sum of squares of a thread's elements of a row: a sum of each pack first, so that no chain of additions is longer
// than a pack's elements or the number of packs.
template <typename T, int N>
inline float square_sum(thread const uint4 (&packs)[N], T edge) {
  float sum = float(edge) * float(edge);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float v[16 / sizeof(T)];
    unpack<T>(packs[i], v);
    float of_pack = v[0] * v[0];
#pragma unroll
    for (int j = 1; j < pack_size<T>(); ++j) {
      of_pack += v[j] * v[j];
    }
    sum += of_pack;
  }
  return sum;
}

// x * n is rounded to T before the scale is applied, as mx does. Without a scale the store rounds.
template <typename T, int W>
inline void normalize(thread float (&v)[W], float n, bool has_weight, thread const float (&weight)[W], float offset) {
#pragma unroll
  for (int i = 0; i < W; ++i) {
    v[i] *= n;
  }
  if (has_weight) {
    round_values<T>(v);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      v[i] *= weight[i] + offset;
    }
  }
}

// Of two inputs the second, a residual, is added to the norm of the first. clipped: the sum, to the range of float16, in
// which NaN stays.
template <typename T, int inputs_of_row = 1, bool clipped = false>
struct RmsNorm {
  using Element = T;
  using Stat = float;  // sum of squares
  using Row = float;   // n
  enum { inputs = inputs_of_row, weights = 1, reduces = 1, numbers = 1 };
  static constant constexpr float fill = 0;
  RowInput<T> rows[inputs];
  WeightInput<T> columns[1];
  RowOutput<T> y;
  float eps;
  float weight_offset;

  Stat none() const {
    return 0;
  }
  template <int N>
  Stat of(thread const RowParts<T, inputs, N>& x, RowBatch) const {
    return square_sum(x.packs[0], x.edges[0]);
  }
  Row done(Stat sum, uint columns_of_row) const {
    return rstd(sum, columns_of_row, eps);
  }
  template <int W>
  void write(thread float (&v)[inputs][W], thread const float (&w)[1][W], Row n) const {
    normalize<T>(v[0], n, columns[0].present, w[0], weight_offset);
    if constexpr (inputs == 2) {
      round_values<T>(v[0]);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        v[0][i] += v[1][i];
      }
    }
    if constexpr (clipped) {
#pragma unroll
      for (int i = 0; i < W; ++i) {
        v[0][i] = v[0][i] > 65504.0f ? 65504.0f : v[0][i] < -65504.0f ? -65504.0f : v[0][i];
      }
    }
  }
};

}  // namespace mittens
