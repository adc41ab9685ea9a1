// Quantized matrices as parameters of kernels, and where a stack's matrix starts.
#pragma once

#include <metal_stdlib>

#include "params/matmul.h"

using namespace metal;

namespace mittens {

// Elements from the start of the array to its matrix number `index`. Unrolled, so that params are not indexed at run
// time.
inline int64_t matrix_offset(constant BatchParams& batch, constant int64_t* strides, uint index) {
  int64_t offset = 0;
  if (batch.axes > 0) {
#pragma unroll
    for (int axis = 3; axis >= 0; --axis) {
      offset += int64_t(index % batch.shape[axis]) * strides[axis];
      index /= batch.shape[axis];
    }
  }
  return offset;
}

}  // namespace mittens

// The parameters of a quantized matrix w, or of a stack [.., rows, columns * bits / 32], with w_scales and w_biases
// [.., rows, columns / group]. The arguments are the indices of the three buffers and the type of the scales. Formats
// without biases do not read w_biases.
#define quantized_matrix(w, words, scales, biases, ...)   \
  const device uint* w [[buffer(words)]],                  \
  const device __VA_ARGS__* w##_scales [[buffer(scales)]], \
  const device __VA_ARGS__* w##_biases [[buffer(biases)]]
