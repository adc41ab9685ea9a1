// Rows of affine quantized weights of 2, 3, 4, 5, 6 or 8 bits, as mx.quantize packs them: w[n, k] = scale * q[n, k] + bias,
// scale and bias shared by a group of k.
#pragma once

#include "mittens/source.h"
#include "mittens/source/integers.h"

namespace mittens {

// A matrix from some row and column on: words of integers, scales and biases, each with strides of its own.
template <typename T>
struct AffineMatrix {
  const device uint* words;
  const device T* scales;
  const device T* biases;
  uint words_stride;  // from row to row
  uint scales_stride;
  uint biases_stride;

  AffineMatrix row(uint n) const {
    AffineMatrix result = *this;
    result.words += size_t(n) * words_stride;
    result.scales += size_t(n) * scales_stride;
    result.biases += size_t(n) * biases_stride;
    return result;
  }
};

// Where rows begin, in a matrix that holds others.
struct AffineStart {
  uint words = 0;
  uint scales = 0;
  uint biases = 0;
};

// Its rows as a source. E: columns that a lane takes at once, a run; 16 with 2, 3, 5 or 6 bits. As elements one by one,
// rows are of 4 or 8 bits.
template <typename T, int bits, int E>
struct Affine {
  using Operand = typename OperandOf<T>::type;
  using Values = typename IntegersOf<bits, E>::type;
  static constant constexpr bool has_bias = true;
  static constant constexpr bool fits_half = true;
  struct Run {
    typename Values::Words words;
    T scale;
    T bias;
  };
  AffineMatrix<T> matrix;
  uint group_shift;  // a group is 1 << group_shift columns
  AffineStart start;

  Run load(uint row, uint more, uint column) const {
    const uint group = column >> group_shift;
    Run run;
    run.words =
        Values::load(matrix.words, start.words + row * matrix.words_stride + more * matrix.words_stride, column);
    run.scale = matrix.scales[start.scales + row * matrix.scales_stride + more * matrix.scales_stride + group];
    run.bias = matrix.biases[start.biases + row * matrix.biases_stride + more * matrix.biases_stride + group];
    return run;
  }

  Run load(uint row, uint part) const {
    return load(row, 0, part * E);
  }

  // The matrix from some row and column on, or from its first element where these are not there.
  Affine from_place(uint row, uint column, bool is_there) const {
    const uint group = column >> group_shift;
    Affine result = *this;
    result.start.words = is_there ? start.words + row * matrix.words_stride + column / (32 / bits) : 0;
    result.start.scales = is_there ? start.scales + row * matrix.scales_stride + group : 0;
    result.start.biases = is_there ? start.biases + row * matrix.biases_stride + group : 0;
    return result;
  }

  static float scale(Run run) {
    return float(run.scale);
  }
  static float bias(Run run) {
    return float(run.bias);
  }

  static Operand element(Run run, int i) {
    constexpr int of_word = 32 / bits;
    const uint word = run.words.at[i / of_word];
    if constexpr (is_same_v<T, half>) {
      return fma(half_integer<bits>(word, i % of_word), run.scale, run.bias);
    } else {
      return Operand(fma(float_integer<bits>(word, i % of_word), float(run.scale), float(run.bias)));
    }
  }

  // The matrix from another row on; alone: with all of its rows at that one.
  Affine at(uint row, bool alone) const {
    Affine result = {matrix.row(row), group_shift, start};
    result.matrix.words_stride = alone ? 0 : matrix.words_stride;
    result.matrix.scales_stride = alone ? 0 : matrix.scales_stride;
    result.matrix.biases_stride = alone ? 0 : matrix.biases_stride;
    return result;
  }
};

template <typename Source>
struct IsAffine {
  static constant constexpr bool value = false;
};

template <typename T, int bits, int E>
struct IsAffine<Affine<T, bits, E>> {
  static constant constexpr bool value = true;
};

}  // namespace mittens
