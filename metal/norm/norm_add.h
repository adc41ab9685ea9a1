// The two norms of norm_add_norm (norm/norm_add_norm.metal), as parameters of its kernels leave them.
#pragma once

#include "norm/rms_norm.h"

namespace mittens {

template <bool clipped, typename T, typename Schedule>
inline void run_norm_add_norm(
    Schedule schedule, const device T* x, const device T* residual, const device T* weight, const device T* next_weight,
    device T* y, device T* sum, constant RowOpParams& params, RowThread at, threadgroup float* scratch) {
  const RmsNorm<T, 2, clipped> first = {
      {input_of(x, params, 0), input_of(residual, params, 1)},
      {weight_of(weight, params, 0)},
      output_of(sum, params, 1),
      params.eps,
      params.weight_offsets[0]};
  const RmsNorm<T> norm = {
      {{sum, params.y_phases[1]}},
      {weight_of(next_weight, params, 1)},
      output_of(y, params, 0),
      params.eps,
      params.weight_offsets[1]};
  run_rows(schedule, first, norm, params.row, at, scratch);
}

}  // namespace mittens
