// A norm, a residual sum and its norm on the CPU. Arrays are row contiguous and of one type; sums are in float32.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

// A scale of a norm: values + offset, or 1 where there are no values.
struct NormScale {
  const void* values;  // [columns] or nullptr
  float offset;
};

// sum = round(residual + rms_norm(x, scale)); y = rms_norm(sum, next_scale). Either output may be either input.
void norm_add_norm(Type type,
                   const void* x,  // [rows, columns]
                   const void* residual,  // [rows, columns]
                   NormScale scale, NormScale next_scale,
                   void* y,  // [rows, columns]
                   void* sum,  // [rows, columns]
                   size_t rows, size_t columns, float eps);

}  // namespace mittens::cpu
