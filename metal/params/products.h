// Compiled by C++ and by Metal.
#pragma once

namespace mittens {

// What kernels of products have room for in threadgroup memory, and what those of one row take at once
// (mittens/quantized_row.h). Enumerators: Metal takes no variable outside of a function that is not in constant memory.
enum {
  kProductSimdgroups = 8,   // of a threadgroup, which share out the columns
  kRowSimdgroups = 16,      // the same in quantized_row.metal and quantized_swiglu_row.metal
  kProductPartials = 1024,  // floats that they leave for the last step (mittens/products.h)
  kRowBlocks = 2,           // of 8 products of a simdgroup: what a tensor core's left matrix holds
  kRowStep = 512,           // columns of a simdgroup
};

}  // namespace mittens
