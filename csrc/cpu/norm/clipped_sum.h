// A residual sum with a norm that stays within the range of float16, on the CPU. Arrays are row contiguous.
#pragma once

#include "cpu/norm/norm_add_norm.h"

namespace mittens::cpu {

// sum = residual + rms_norm(x, scale), clipped to finite numbers and rounded; all of float16. sum may be x or residual.
void clipped_sum(const void* x,  // [rows, columns]
                 const void* residual,  // [rows, columns]
                 NormScale scale,
                 void* sum,  // [rows, columns]
                 size_t rows, size_t columns, float eps);

}  // namespace mittens::cpu
