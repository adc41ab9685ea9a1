// Gradient of softmax over the last axis, from its output y and the output's gradient dy:
//
//   dx[r, c] = T(y[r, c] * (dy[r, c] - d[r])),   d[r] = sum_c y[r, c] * dy[r, c] / sum_c y[r, c]
//
// y, dy, dx [rows, columns]; float32 inside, rounded once. dx may be y or dy. The y of a row add up to 1 before they
// are rounded to T; where one of them is nearly 1, dy - d without the division would be mostly rounding error.
// Schedules: mittens/row_op.h.
#include <metal_stdlib>

#include "mittens/row_op.h"

using namespace metal;
using namespace mittens;

template <typename T>
struct SoftmaxVjp {
  using Element = T;
  using Stat = float2;  // sums of y * dy and of y
  using Row = float;    // the mean of dy, weighted by y
  enum { inputs = 2, weights = 0, reduces = 1, numbers = 2 };
  static constant constexpr float fill = 0;
  RowInput<T> rows[2];
  RowOutput<T> y;

  Stat none() const {
    return float2(0);
  }
  template <int N>
  Stat of(thread const RowParts<T, 2, N>& parts, RowBatch) const {
    Stat sums = float2(float(parts.edges[0]) * float(parts.edges[1]), float(parts.edges[0]));
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float v[16 / sizeof(T)];
      float g[16 / sizeof(T)];
      unpack<T>(parts.packs[0][i], v);
      unpack<T>(parts.packs[1][i], g);
#pragma unroll
      for (int j = 0; j < pack_size<T>(); ++j) {
        sums.x += v[j] * g[j];
        sums.y += v[j];
      }
    }
    return sums;
  }
  // Of a row so long that all y round to zero, zero.
  Row done(Stat sums, uint) const {
    return sums.y == 0.0f ? 0.0f : sums.x / sums.y;
  }
  template <int W>
  void write(thread float (&v)[2][W], thread const float (&)[1][W], Row mean) const {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      v[0][i] *= v[1][i] - mean;
    }
  }
};

template <typename T, typename Schedule>
[[kernel, threads_at_most(Schedule::launched, Schedule::nvidia)]] void softmax_vjp(
    const device T* y [[buffer(0)]],       // [rows, columns]
    const device T* dy [[buffer(1)]],      // [rows, columns]
    device T* dx [[buffer(2)]],            // [rows, columns]
    device float* partials [[buffer(3)]],  // [rows, splits, 2]: sums of y * dy and of y
    constant RowOpParams& params [[buffer(4)]], row_thread_parameters) {
  threadgroup float scratch[64];
  const SoftmaxVjp<T> op = {{input_of(y, params, 0), input_of(dy, params, 1)}, output_of(dx, params, 0)};
  run_rows(Schedule(), NoOp(), op, params.row, row_thread, scratch, partials);
}

instantiate_rows("softmax_vjp", softmax_vjp)
