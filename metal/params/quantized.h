#pragma once

#include "params/batch.h"

namespace mittens {

// Strides are in elements of their array.
struct QuantizedParams {
  BatchParams batch;
  int64_t weight_strides[4];  // of the batch axes
  int64_t scales_strides[4];
  int64_t biases_strides[4];
  uint32_t matrices;
  uint32_t rows;               // of x, for each matrix
  uint32_t columns;            // of x
  uint32_t outputs;            // columns of y
  uint32_t group_shift;        // a group is 1 << group_shift integers
  uint32_t weight_stride;      // from row to row
  uint32_t scales_stride;
  uint32_t biases_stride;
  uint32_t has_bias;
  uint32_t two23;              // 2^23 as a float's bits (mittens/dequantize.h)
  uint32_t outputs_per_group;  // that a threadgroup computes; of the rows kernel
  uint32_t lanes;              // of a simdgroup along the outputs, a power of two; from here on of the columns kernel
  uint32_t splits;             // threadgroups that share the columns of x
  uint32_t columns_per_split;  // that each of them takes
};

}  // namespace mittens
