// Element types of the native CPU kernels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mittens::cpu {

enum class Type { float32, float16, bfloat16 };

// Storage only: kernels convert to float32, compute, and round back.
struct float16 {
  uint16_t bits;
};
struct bfloat16 {
  uint16_t bits;
};

}  // namespace mittens::cpu
