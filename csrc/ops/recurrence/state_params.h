// Params of the kernels of recurrences, and how the rows of a state are shared out among the lanes of a GPU.
#pragma once

#include <bit>

#include "backends/launch.h"
#include "params/recurrence.h"
#include "runtime/array_layout.h"

namespace mittens {

inline uint32_t number_type(mx::Dtype dtype) {
  return dtype == mx::float32 ? kFloat32 : dtype == mx::float16 ? kFloat16 : kBfloat16;
}

// Lanes that share a row of a state.
inline uint32_t lanes_of_row(uint32_t columns) {
  return std::bit_ceil(ceil_divide(columns, kStateValues));
}

// keys [batch, steps, key_heads, columns], values [batch, steps, heads, rows]
inline StateParams state_params(const mx::array& keys, const mx::array& values, bool has_state, bool has_mask) {
  const auto size = [](const mx::array& a, int axis) { return static_cast<uint32_t>(a.shape(axis)); };
  StateParams params;
  params.steps = size(keys, 1);
  params.heads = size(values, 2);
  params.key_heads = size(keys, 2);
  params.rows = size(values, 3);
  params.columns = size(keys, 3);
  params.lanes = lanes_of_row(params.columns);
  params.packs = params.columns % 8 == 0;
  params.has_state = has_state;
  params.has_mask = has_mask;
  return params;
}

inline Size3 state_grid(const StateParams& params, int batch) {
  const uint32_t rows = kStateSimdgroups * 32 / params.lanes;  // of a threadgroup
  return {static_cast<uint32_t>(batch) * params.heads, ceil_divide(params.rows, rows), 1};
}

}  // namespace mittens
