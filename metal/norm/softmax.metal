// Softmax over the last axis:
//
//   y[r, c] = T(exp(x[r, c] - m[r]) / l[r]),   m[r] = max_c x[r, c],   l[r] = sum_c exp(x[r, c] - m[r])
//
// x, y [rows, columns]; float32 inside, rounded once. exp(v) is taken as exp2(v * log2(e)). y may be x.
// A row that is all -inf, or holds a NaN or +inf, becomes NaN, as in mx. Schedules: mittens/row_op.h. Each thread
// takes exponentials against its own maximum, so that one barrier serves maximum and sum.
#include <metal_stdlib>

#include "mittens/row_op.h"
#include "mittens/softmax.h"

using namespace metal;
using namespace mittens;

template <typename T>
struct Softmax {
  using Element = T;
  using Stat = SoftmaxState<float>;
  using Row = float2;  // m and 1 / l
  enum { inputs = 1, weights = 0, reduces = 1, numbers = 2 };
  static constant constexpr float fill = -INFINITY;
  RowInput<T> rows[1];
  RowOutput<T> y;

  Stat none() const {
    return Stat{-INFINITY, 0};
  }
  template <int N>
  Stat of(thread const RowParts<T, 1, N>& x, RowBatch batch) const {
    RowParts<T, 1, N> parts = x;
    Stat own = Stat{float(x.edges[0]), 0};
    float v[16 / sizeof(T)];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      unpack<T>(parts.packs[0][i], v);
#pragma unroll
      for (int j = 0; j < pack_size<T>(); ++j) {
        own.m = max(own.m, v[j]);
      }
    }
    unpack_again(parts, rows[0], batch);
    const float base = finite_maximum(own.m);
    own.l = exp_of<T>(float(x.edges[0]) - base);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      unpack<T>(parts.packs[0][i], v);
#pragma unroll
      for (int j = 0; j < pack_size<T>(); ++j) {
        own.l += exp_of<T>(v[j] - base);
      }
    }
    return own;
  }
  Row done(Stat all, uint) const {
    return float2(all.m, 1.0f / all.l);
  }
  template <int W>
  void write(thread float (&v)[1][W], thread const float (&)[1][W], Row row) const {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      v[0][i] = exp_of<T>(v[0][i] - row.x) * row.y;
    }
  }
};

template <typename T, typename Schedule>
[[kernel, threads_at_most(Schedule::launched, Schedule::nvidia)]] void softmax(
    const device T* x [[buffer(0)]],       // [rows, columns]
    device T* y [[buffer(1)]],             // [rows, columns]
    device float* partials [[buffer(2)]],  // [rows, splits, 2]: m and l
    constant RowOpParams& params [[buffer(3)]], row_thread_parameters) {
  threadgroup float scratch[64];
  const Softmax<T> op = {{input_of(x, params, 0)}, output_of(y, params, 0)};
  run_rows(Schedule(), NoOp(), op, params.row, row_thread, scratch, partials);
}

instantiate_rows("softmax", softmax)
