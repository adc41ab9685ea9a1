// Root mean square norm over the last axis:
//
//   y[r, c] = T(x[r, c] * n[r]) * (weight[c] + offset),   n[r] = 1 / sqrt(mean_c(x[r, c]^2) + eps)
//
// x, y [rows, columns], weight [columns] or absent; sums in float32. y may be x. Schedules: mittens/row_op.h.
#include <metal_stdlib>

#include "norm/rms_norm.h"

using namespace metal;
using namespace mittens;

template <typename T, typename Schedule>
[[kernel, threads_at_most(Schedule::launched, Schedule::nvidia)]] void rms_norm(
    const device T* x [[buffer(0)]],       // [rows, columns]
    const device T* weight [[buffer(1)]],  // [columns]
    device T* y [[buffer(2)]],             // [rows, columns]
    device float* partials [[buffer(3)]],  // [rows, splits]
    constant RowOpParams& params [[buffer(4)]], row_thread_parameters) {
  threadgroup float scratch[32];
  const RmsNorm<T> op = {
      {input_of(x, params, 0)},
      {weight_of(weight, params, 0)},
      output_of(y, params, 0),
      params.eps,
      params.weight_offsets[0]};
  run_rows(Schedule(), NoOp(), op, params.row, row_thread, scratch, partials);
}

instantiate_rows("rms_norm", rms_norm)
