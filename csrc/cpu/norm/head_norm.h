// Root mean square normalisation of heads on the CPU: rms_norm of rows that lie anywhere.
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace mittens::cpu {

// Rows [sizes[0], sizes[1], sizes[2], columns] by strides in elements; columns have stride 1.
struct StridedRows {
  const void* data;
  int64_t sizes[3];
  int64_t strides[3];
};

// y = round(x / sqrt(mean(x^2) + eps)) * (weight + weight_offset), rounded again. y may be x where that is contiguous.
void head_norm(Type type, StridedRows x,
               const void* weight,  // [columns] or nullptr
               void* y,  // [rows, columns]
               size_t columns, float eps, float weight_offset);

}  // namespace mittens::cpu
