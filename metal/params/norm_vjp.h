#pragma once

#include "params/rows.h"

namespace mittens {

// A kernel's share of the gradients of rms_norm and layer_norm.
struct NormVjpParams {
  RowParams row;
  uint32_t blocks;  // threadgroups along the rows: block b takes rows b, b + blocks, ...
  uint32_t has_weight;
  uint32_t has_dsum;
  uint32_t partial_sums;  // of the parameters' gradients, written to partials: 0, 1 (weight) or 2 (and bias)
  float eps;
};

struct ColumnSumParams {
  uint32_t blocks;
  uint32_t columns;
  uint32_t first;  // 0 where dweight is wanted, 1 where only dbias is
};

}  // namespace mittens
