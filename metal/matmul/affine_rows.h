// Affine quantized weights as the source of products by rows (matmul/rows.h).
#pragma once

#include "matmul/batch.h"
#include "mittens/source/affine.h"
#include "params/matmul.h"

namespace mittens {

// Matrix `index` of a stack.
template <int bits, int E, typename T>
inline AffineRows<T, bits, E> affine_rows(
    const device uint* w, const device T* scales, const device T* biases, constant QuantizedParams& params, uint index) {
  return {
      w + matrix_offset(params.batch, params.weight_strides, index),
      scales + matrix_offset(params.batch, params.scales_strides, index),
      biases + matrix_offset(params.batch, params.biases_strides, index),
      params.weight_stride,
      params.scales_stride,
      params.biases_stride,
      params.group_shift,
  };
}

}  // namespace mittens
