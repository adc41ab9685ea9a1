// Layer norm over the last axis:
//
//   y[r, c] = T((x[r, c] - mean[r]) * n[r]) * weight[c] + bias[c],   n[r] = 1 / sqrt(variance[r] + eps)
//
// x, y [rows, columns], weight and bias [columns] or absent; float32 inside, rounded after each of the three steps as
// mx does. The variance is the mean square of x - mean, never a difference of two sums; past the range of float32 it is
// infinite, and T((x - mean) * n) is 0. y may be x. Schedules: mittens/row_op.h.
#include <metal_stdlib>

#include "mittens/welford.h"

using namespace metal;
using namespace mittens;

template <typename T>
struct LayerNorm {
  using Element = T;
  using Stat = Moments;
  using Row = float2;  // mean / 2 and 2 n: (x - mean) n is (x / 2 - mean / 2) 2 n, which does not overflow on the way
  enum { inputs = 1, weights = 2, reduces = 1, numbers = 3 };
  static constant constexpr float fill = 0;
  RowInput<T> rows[1];
  WeightInput<T> columns[2];
  RowOutput<T> y;
  float eps;

  Stat none() const {
    return Stat{0, 0, 0};
  }
  template <int N>
  Stat of(thread const RowParts<T, 1, N>& x, RowBatch batch) const {
    return moments_of(x, batch);
  }
  Row done(Stat all, uint columns_of_row) const {
    return float2(0.5f * all.mean, 2.0f * precise::rsqrt(all.m2 / float(columns_of_row) + eps));
  }
  template <int W>
  void write(thread float (&v)[1][W], thread const float (&w)[2][W], Row row) const {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      v[0][i] = half_centred(v[0][i], row.x) * row.y;
    }
    if (columns[0].present) {
      round_values<T>(v[0]);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        v[0][i] *= w[0][i];
      }
    }
    if (columns[1].present) {
      round_values<T>(v[0]);
#pragma unroll
      for (int i = 0; i < W; ++i) {
        v[0][i] += w[1][i];
      }
    }
  }
};

template <typename T, typename Schedule>
[[kernel, threads_at_most(Schedule::launched, Schedule::nvidia)]] void layer_norm(
    const device T* x [[buffer(0)]],       // [rows, columns]
    const device T* weight [[buffer(1)]],  // [columns]
    const device T* bias [[buffer(2)]],    // [columns]
    device T* y [[buffer(3)]],             // [rows, columns]
    device float* partials [[buffer(4)]],  // [rows, splits, 3]: count, mean, m2
    constant RowOpParams& params [[buffer(5)]], row_thread_parameters) {
  threadgroup float scratch[96];
  const LayerNorm<T> op = {
      {input_of(x, params, 0)},
      {weight_of(weight, params, 0), weight_of(bias, params, 1)},
      output_of(y, params, 0),
      params.eps};
  run_rows(Schedule(), NoOp(), op, params.row, row_thread, scratch, partials);
}

instantiate_rows("layer_norm", layer_norm)
instantiate_types("layer_norm_block8", layer_norm, InThreadgroupOrLooped<8>)
