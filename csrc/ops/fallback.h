// The one rule for what our kernels do not cover: mx computes it, unless strict mode asks for an error instead, so that
// no benchmark or test takes mx for ours.
#pragma once

#include <string>

#include "mlx/dtype.h"

namespace mittens {

// Called where an op is about to hand over to its mx twin. Throws std::runtime_error in strict mode.
void send_to_mx(const char* op, const std::string& reason);

// Whether the kernels compute in this dtype.
inline bool has_kernels(mlx::core::Dtype dtype) {
  return dtype == mlx::core::float32 || dtype == mlx::core::float16 || dtype == mlx::core::bfloat16;
}

}  // namespace mittens
