// A norm, a residual sum and its norm in one pass over memory:
//
//   sum[r, c] = T(residual[r, c] + T(T(x[r, c] * m[r]) * scale[c])),   m[r] = 1 / sqrt(mean_c(x[r, c]^2) + eps)
//   y[r, c]   = T(sum[r, c] * n[r]) * next_scale[c],                   n[r] = 1 / sqrt(mean_c(sum[r, c]^2) + eps)
//
// x, residual, y, sum [rows, columns]; scale = weight + offset, [columns] or absent; float32 inside. y may be x and sum
// may be residual. Schedules: mittens/row_op.h, but that rows are not split. Where a row does not stay in registers, the
// second norm reads the sum that was written.
#include <metal_stdlib>

#include "norm/norm_add.h"

using namespace metal;
using namespace mittens;

template <typename T, typename Schedule>
[[kernel, threads_at_most(Schedule::launched, Schedule::nvidia)]] void norm_add_norm(
    const device T* x [[buffer(0)]],            // [rows, columns]
    const device T* residual [[buffer(1)]],     // [rows, columns]
    const device T* weight [[buffer(2)]],       // [columns]
    const device T* next_weight [[buffer(3)]],  // [columns]
    device T* y [[buffer(4)]],                  // [rows, columns]
    device T* sum [[buffer(5)]],                // [rows, columns]
    constant RowOpParams& params [[buffer(6)]], row_thread_parameters) {
  threadgroup float scratch[64];
  run_norm_add_norm<false>(Schedule(), x, residual, weight, next_weight, y, sum, params, row_thread, scratch);
}

instantiate_types("norm_add_norm_simd8", norm_add_norm, InLanes<8, 1>)
instantiate_types("norm_add_norm_simd16", norm_add_norm, InLanes<16, 1>)
instantiate_types("norm_add_norm_simd32", norm_add_norm, InLanes<32, 1>)
instantiate_types("norm_add_norm_simd32x2", norm_add_norm, InLanes<32, 2>)
instantiate_types("norm_add_norm_simd32x4", norm_add_norm, InLanes<32, 4>)
instantiate_types("norm_add_norm_block1", norm_add_norm, InThreadgroup<1>)
instantiate_types("norm_add_norm_block2", norm_add_norm, InThreadgroup<2>)
instantiate_types("norm_add_norm_block4", norm_add_norm, InThreadgroupOrLooped<4>)
instantiate_types("norm_add_norm_looped", norm_add_norm, Looped<looped_packs(is_nvidia)>)
