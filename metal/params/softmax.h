#pragma once

#include "params/rows.h"

namespace mittens {

// A phase counts elements between the last 16-byte boundary and the array's start.
struct SoftmaxParams {
  RowParams row;
  uint32_t x_phase;
  uint32_t y_phase;
};

struct SoftmaxVjpParams {
  RowParams row;
  uint32_t y_phase;
  uint32_t dy_phase;
  uint32_t dx_phase;
};

}  // namespace mittens
