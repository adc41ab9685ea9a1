// Affine quantized weights as the kernels for NVIDIA GPUs take them.
#pragma once

#include "matmul/batch.h"
#include "mittens/dequantize.h"
#include "mittens/source/affine.h"
#include "params/matmul.h"

namespace mittens {

template <int bits>
constexpr Format affine() {
  return bits == 4 ? affine4 : affine8;
}

// The weight of the middle integer, which unpack_word takes for zero.
template <int bits>
inline float middle_bias(float scale, float bias) {
  return fma(float(zero_of<affine<bits>()>()), scale, bias);
}

// A weight times 2^bit_of(i), from what unpack_word made of integer i: with its own bias, since that of the middle
// would be rounded once more.
template <Format F>
inline float dequantized_weight(float q, int i, float scale, float bias) {
  return fma(q + zero_of<F>() / activation_scale<F>(i), scale, bias / activation_scale<F>(i));
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

template <int P>
inline void load_words(const device uint* p, thread uint (&words)[P]) {
  if constexpr (P == 4) {
    const uint4 v = *(const device uint4*)p;
    words[0] = v.x;
    words[1] = v.y;
    words[2] = v.z;
    words[3] = v.w;
  } else if constexpr (P == 2) {
    const uint2 v = *(const device uint2*)p;
    words[0] = v.x;
    words[1] = v.y;
  } else {
    words[0] = *p;
  }
}

}  // namespace mittens
