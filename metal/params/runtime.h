// Parameters of the copy of a view. Compiled by C++ and by Metal.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mittens {

// An enumerator: Metal takes no variable outside of a function that is not in constant memory.
enum { kCopyDims = 8 };

// The copy of a strided view into row contiguous memory.
struct CopyParams {
  int64_t strides[kCopyDims];  // of the outer dimensions, in elements
  int64_t column_stride;
  int64_t start;              // element of the source at which the view starts
  uint32_t shape[kCopyDims];  // of the outer dimensions
  uint32_t dims;              // how many outer dimensions there are
  uint32_t columns;
  uint32_t chunks;  // threadgroups along a row
};

}  // namespace mittens
