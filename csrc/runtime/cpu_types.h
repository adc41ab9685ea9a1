// Arguments of the native CPU code: element types and raw pointers, which outlive the task since MLX keeps the arrays
// of an evaluation.
#pragma once

#include "cpu/types.h"
#include "mlx/array.h"

namespace mittens {

inline cpu::Type native_type(mlx::core::Dtype dtype) {
  return dtype == mlx::core::float32   ? cpu::Type::float32
         : dtype == mlx::core::float16 ? cpu::Type::float16
                                       : cpu::Type::bfloat16;
}

inline const void* data_of(const mlx::core::array& array) {
  return array.data<void>();
}

inline void* data_of(mlx::core::array& array) {
  return array.data<void>();
}

}  // namespace mittens
