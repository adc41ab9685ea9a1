// How a product of few rows of x is shared out.
#pragma once

#include <cstdint>

namespace mittens {

struct RowProductsPlan {
  uint32_t simdgroups;  // of a threadgroup, which share out the columns
  uint32_t outputs_per_group;
};

// Packed weights: matmul/qmv.metal, matmul/quantized_swiglu.metal and matmul/gguf_matmul.metal.
//
// chunks: of columns, each what a simdgroup takes at once. outputs: of all matrices and blocks of rows. products: of a
// simdgroup for each output. held: simdgroups that a large GPU holds at once.
RowProductsPlan plan_row_products(uint32_t chunks, uint64_t outputs, uint32_t products, uint32_t resident_simdgroups);

// Products by 8x8 matrices: matmul/gemv_tiles.metal and matmul/qmm.metal. Simdgroups of a threadgroup, `fewest` to
// `most`, that are through with their chunks of columns in the fewest rounds. Threadgroups that find no room on any
// core start when others end, and take as long again: the rounds of all these waves count. Of several numbers it is the
// smallest, since each simdgroup takes time to start.
//
// held_by_core: simdgroups that a core of a large GPU is counted on to hold at once, `most` at least.
uint32_t plan_tile_simdgroups(uint64_t threadgroups, uint32_t chunks, uint32_t held_by_core, uint32_t fewest,
                              uint32_t most);

}  // namespace mittens
