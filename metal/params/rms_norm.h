#pragma once

#include "params/rows.h"

namespace mittens {

// A phase counts elements between the last 16-byte boundary and the array's start.
struct RmsNormParams {
  RowParams row;
  uint32_t x_phase;
  uint32_t weight_phase;
  uint32_t y_phase;
  uint32_t has_weight;
  float eps;
};

struct AddRmsNormParams {
  RowParams row;
  uint32_t x_phase;
  uint32_t residual_phase;
  uint32_t weight_phase;
  uint32_t y_phase;
  uint32_t sum_phase;
  uint32_t has_weight;
  float eps;
};

}  // namespace mittens
