#pragma once

#include "params/rows.h"

namespace mittens {

// A phase counts elements between the last 16-byte boundary and the array's start.
struct LayerNormParams {
  RowParams row;
  uint32_t x_phase;
  uint32_t weight_phase;
  uint32_t bias_phase;
  uint32_t y_phase;
  uint32_t has_weight;
  uint32_t has_bias;
  float eps;
};

}  // namespace mittens
