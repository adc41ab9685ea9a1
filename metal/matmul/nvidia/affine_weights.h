// Where affine quantized weights lie: words of integers, scales and biases, each with strides of its own.
#pragma once

#include "matmul/batch.h"
#include "mittens/dequantize.h"
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

// A matrix of weights, from some row and column on.
template <typename T>
struct AffineWeights {
  const device uint* words;
  const device T* scales;
  const device T* biases;
  uint words_stride;  // from row to row
  uint scales_stride;
  uint biases_stride;
};

// Matrix `index` from row `first` on.
template <typename T>
inline AffineWeights<T> matrix_of(
    const device uint* w, const device T* scales, const device T* biases, constant QuantizedParams& params, uint index,
    uint first) {
  AffineWeights<T> result;
  result.words =
      w + matrix_offset(params.batch, params.weight_strides, index) + size_t(first) * params.weight_stride;
  result.scales =
      scales + matrix_offset(params.batch, params.scales_strides, index) + size_t(first) * params.scales_stride;
  result.biases =
      biases + matrix_offset(params.batch, params.biases_strides, index) + size_t(first) * params.biases_stride;
  result.words_stride = params.weight_stride;
  result.scales_stride = params.scales_stride;
  result.biases_stride = params.biases_stride;
  return result;
}

template <int bits, typename T>
inline AffineWeights<T> at_column(AffineWeights<T> matrix, uint column, uint group_shift) {
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
