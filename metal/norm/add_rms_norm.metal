// A residual sum and its root mean square norm in one pass over memory:
//
//   sum[r, c] = T(x[r, c] + residual[r, c])
//   y[r, c]   = T(sum[r, c] * n[r]) * (weight[c] + offset),   n[r] = 1 / sqrt(mean_c(sum[r, c]^2) + eps)
//
// x, residual, y, sum [rows, columns], weight [columns] or absent; float32 inside, the norm is of the rounded sum. y
// may be x and sum may be residual. Schedules: mittens/row_op.h. Where a row does not stay in registers, the norm reads
// the sum that was written.
#include <metal_stdlib>

#include "norm/rms_norm.h"

using namespace metal;
using namespace mittens;

template <typename T>
struct AddRows {
  using Element = T;
  using Row = bool;
  enum { inputs = 2, weights = 0, reduces = 0, numbers = 0 };
  static constant constexpr float fill = 0;
  RowInput<T> rows[2];
  RowOutput<T> y;

  template <int W>
  void write(thread float (&v)[2][W], thread const float (&)[1][W], Row) const {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      v[0][i] += v[1][i];
    }
  }
};

template <typename T, typename Schedule>
[[kernel, threads_at_most(Schedule::launched, Schedule::nvidia)]] void add_rms_norm(
    const device T* x [[buffer(0)]],         // [rows, columns]
    const device T* residual [[buffer(1)]],  // [rows, columns]
    const device T* weight [[buffer(2)]],    // [columns]
    device T* y [[buffer(3)]],               // [rows, columns]
    device T* sum [[buffer(4)]],             // [rows, columns]
    device float* partials [[buffer(5)]],    // [rows, splits]
    constant RowOpParams& params [[buffer(6)]], row_thread_parameters) {
  threadgroup float scratch[32];
  const AddRows<T> add = {{input_of(x, params, 0), input_of(residual, params, 1)}, output_of(sum, params, 1)};
  const RmsNorm<T> norm = {
      {{sum, params.y_phases[1]}},
      {weight_of(weight, params, 0)},
      output_of(y, params, 0),
      params.eps,
      params.weight_offsets[0]};
  run_rows(Schedule(), add, norm, params.row, row_thread, scratch, partials);
}

instantiate_rows("add_rms_norm", add_rms_norm)
