// norm/norm_add_norm.metal in float16, whose sum is clipped to finite numbers:
//
//   sum[r, c] = T(min(max(residual[r, c] + T(T(x[r, c] * m[r]) * scale[c]), -65504), 65504))
#include <metal_stdlib>

#include "norm/norm_add.h"

using namespace metal;
using namespace mittens;

template <typename Schedule>
[[kernel, threads_at_most(Schedule::launched, Schedule::nvidia)]] void clipped_norm_add_norm(
    const device half* x [[buffer(0)]],            // [rows, columns]
    const device half* residual [[buffer(1)]],     // [rows, columns]
    const device half* weight [[buffer(2)]],       // [columns]
    const device half* next_weight [[buffer(3)]],  // [columns]
    device half* y [[buffer(4)]],                  // [rows, columns]
    device half* sum [[buffer(5)]],                // [rows, columns]
    constant RowOpParams& params [[buffer(6)]], row_thread_parameters) {
  threadgroup float scratch[64];
  run_norm_add_norm<true>(Schedule(), x, residual, weight, next_weight, y, sum, params, row_thread, scratch);
}

instantiate_kernel("norm_add_norm_clipped_simd8_float16", clipped_norm_add_norm, InLanes<8, 1>)
instantiate_kernel("norm_add_norm_clipped_simd16_float16", clipped_norm_add_norm, InLanes<16, 1>)
instantiate_kernel("norm_add_norm_clipped_simd32_float16", clipped_norm_add_norm, InLanes<32, 1>)
instantiate_kernel("norm_add_norm_clipped_simd32x2_float16", clipped_norm_add_norm, InLanes<32, 2>)
instantiate_kernel("norm_add_norm_clipped_simd32x4_float16", clipped_norm_add_norm, InLanes<32, 4>)
instantiate_kernel("norm_add_norm_clipped_block1_float16", clipped_norm_add_norm, InThreadgroup<1>)
instantiate_kernel("norm_add_norm_clipped_block2_float16", clipped_norm_add_norm, InThreadgroup<2>)
instantiate_kernel("norm_add_norm_clipped_block4_float16", clipped_norm_add_norm, InThreadgroupOrLooped<4>)
instantiate_kernel("norm_add_norm_clipped_looped_float16", clipped_norm_add_norm, Looped<looped_packs(is_nvidia)>)
