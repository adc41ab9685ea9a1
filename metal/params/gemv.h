// Compiled by C++ and by Metal.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mittens {

enum { kShortSimdgroups = 8 };  // of a threadgroup of gemv_short, each with an output of its own

struct GemvParams {
  uint32_t rows;               // of x
  uint32_t columns;            // of x
  uint32_t outputs;            // columns of y
  uint32_t weight_stride;      // elements from row to row of w
  uint32_t splits;             // threadgroups that share the columns of x
  uint32_t columns_per_split;  // that each of them takes
  uint32_t rounds;             // tiles kernel: times that a threadgroup's simdgroups take columns
  uint32_t round_mask;         // of a threadgroup's number: which of these it begins with
  uint32_t sharers;            // rows kernel: simdgroups that share the columns of a few rows of w
  uint32_t lanes;              // columns kernel: lanes of a simdgroup along the outputs, 1 to 32
  uint32_t has_bias;
};

struct GemvShortParams {
  uint32_t columns;
  uint32_t outputs;
  uint32_t weight_stride;
  uint32_t has_bias;
};

struct SplitSumParams {
  uint32_t splits;
  uint32_t rows;
  uint32_t outputs;
  uint32_t has_bias;
};

}  // namespace mittens
