// The axes of a stack of matrices, merged where strides allow. Compiled by C++ and by Metal.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mittens {

struct BatchParams {
  uint32_t axes;      // 0 where there is one matrix, at most 4
  uint32_t shape[4];  // 1 from `axes` on
};

}  // namespace mittens
