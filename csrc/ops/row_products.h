// How a product of few rows of x with packed weights is shared out: quantized_rows.metal, quantized_swiglu.metal and
// block_matmul.metal.
#pragma once

#include <cstdint>

namespace mittens {

struct RowProductsPlan {
  uint32_t simdgroups;  // of a threadgroup, which share out the columns
  uint32_t outputs_per_group;
};

// chunks: of columns, each what a simdgroup takes at once. outputs: of all matrices and blocks of rows. products: of a
// simdgroup for each output. held: simdgroups that a large GPU holds at once.
RowProductsPlan plan_row_products(uint32_t chunks, uint64_t outputs, uint32_t products, uint32_t held);

}  // namespace mittens
