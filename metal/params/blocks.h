// Compiled by C++ and by Metal.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mittens {

struct BlocksParams {
  uint32_t rows;               // of x
  uint32_t columns;            // of x
  uint32_t outputs;            // columns of y
  uint32_t outputs_per_group;  // that a threadgroup computes
  uint32_t has_bias;
  uint32_t two23;              // 2^23 as a float's bits (mittens/dequantize.h)
};

struct BlockCountParams {
  uint32_t count;  // of blocks
};

}  // namespace mittens
