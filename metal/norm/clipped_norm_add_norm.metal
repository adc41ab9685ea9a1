// norm/norm_add_norm.metal in float16, whose sum is clipped to finite numbers:
//
//   sum[r, c] = T(min(max(residual[r, c] + T(T(x[r, c] * m[r]) * scale[c]), -65504), 65504))
#include <metal_stdlib>

#include "norm/norm_add.h"

using namespace metal;
using namespace mittens;

// NormAdd in float16, within the range. NaN stays.
struct ClippedNormAdd {
  using Element = half;
  using Stat = float;
  using Row = float;
  enum { inputs = 2, weights = 1, reduces = 1, numbers = 1 };
  static constant constexpr float fill = 0;
  RowInput<half> rows[2];
  WeightInput<half> columns[1];
  RowOutput<half> y;
  float eps;
  float weight_offset;

  NormAdd<half> unclipped() const {
    return NormAdd<half>{{rows[0], rows[1]}, {columns[0]}, y, eps, weight_offset};
  }
  Stat none() const {
    return 0;
  }
  template <int N>
  Stat of(thread const RowParts<half, 2, N>& parts, RowBatch batch) const {
    return unclipped().of(parts, batch);
  }
  Row done(Stat sum, uint columns_of_row) const {
    return unclipped().done(sum, columns_of_row);
  }
  template <int W>
  void write(thread float (&v)[2][W], thread const float (&w)[1][W], Row m) const {
    unclipped().write(v, w, m);
    constexpr float largest = 65504;
#pragma unroll
    for (int i = 0; i < W; ++i) {
      v[0][i] = v[0][i] > largest ? largest : v[0][i] < -largest ? -largest : v[0][i];
    }
  }
};

template <typename Schedule>
[[kernel, threads_at_most(Schedule::launched, Schedule::nvidia)]] void clipped_norm_add_norm(
    const device half* x [[buffer(0)]],            // [rows, columns]
    const device half* residual [[buffer(1)]],     // [rows, columns]
    const device half* weight [[buffer(2)]],       // [columns]
    const device half* next_weight [[buffer(3)]],  // [columns]
    device half* y [[buffer(4)]],                  // [rows, columns]
    device half* sum [[buffer(5)]],                // [rows, columns]
    constant RowOpParams& params [[buffer(6)]],
    row_thread_parameters) {
  threadgroup float scratch[64];
  const ClippedNormAdd first = ClippedNormAdd{
      {input_of(x, params, 0), input_of(residual, params, 1)},
      {weight_of(weight, params, 0)},
      output_of(sum, params, 1),
      params.eps,
      params.weight_offsets[0]};
  const RmsNorm<half> norm = RmsNorm<half>{
      {{sum, params.y_phases[1]}},
      {weight_of(next_weight, params, 1)},
      output_of(y, params, 0),
      params.eps,
      params.weight_offsets[1]};
  run_rows(Schedule(), first, norm, params.row, row_thread, scratch);
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
