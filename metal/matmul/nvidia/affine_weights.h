// Affine quantized weights as the kernels for NVIDIA GPUs take them.
#pragma once

#include "matmul/batch.h"
#include "mittens/integers.h"
#include "mittens/source/affine.h"
#include "params/matmul.h"

namespace mittens {

// The weight of the middle integer, which unpack_word takes for zero.
template <int bits>
inline float middle_bias(float scale, float bias) {
  return fma(float(zero_of<bits>()), scale, bias);
}

// A weight times 2^bit_of(i), from integer i as unpack_word leaves it: with its own bias, since the middle's would be
// rounded once more.
template <int bits>
inline float dequantized_weight(float q, int i, float scale, float bias) {
  return fma(q + zero_of<bits>() / activation_scale<bits>(i), scale, bias / activation_scale<bits>(i));
}

// Matrix `index` from row `first` on.
template <typename T>
inline AffineMatrix<T> matrix_of(
    const device uint* w, const device T* scales, const device T* biases, constant QuantizedParams& params, uint index,
    uint first) {
  return {
      w + matrix_offset(params.batch, params.weight_strides, index) + size_t(first) * params.weight_stride,
      scales + matrix_offset(params.batch, params.scales_strides, index) + size_t(first) * params.scales_stride,
      biases + matrix_offset(params.batch, params.biases_strides, index) + size_t(first) * params.biases_stride,
      params.weight_stride,
      params.scales_stride,
      params.biases_stride,
  };
}

template <int bits, typename T>
inline AffineMatrix<T> at_column(AffineMatrix<T> matrix, uint column, uint group_shift) {
  matrix.words += column / (32 / bits);
  matrix.scales += column >> group_shift;
  matrix.biases += column >> group_shift;
  return matrix;
}

}  // namespace mittens
