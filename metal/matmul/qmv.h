// Rows of affine quantized weights passing by the activations that a lane holds: w[n, k] = scale * q[n, k] + bias,
// scale and bias shared by a group of k. A lane owns the columns that P words of a row hold, so that x is read once
// for many rows and a group costs two multiply-adds: scale * sum((q - middle) * x) + (bias + scale * middle) *
// sum(x). In float32 the weights themselves are multiplied: there the rounding of two large sums that cancel would
// show.
#pragma once

#include "matmul/batch.h"
#include "matmul/products.h"
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

// What a lane loads of B rows.
template <typename T, int P, int B>
struct AffineBatch {
  uint words[B][P];
  T scales[B];
  T biases[B];
};

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

template <typename T, int P, int B>
inline void load_batch(AffineWeights<T> w, uint first, thread AffineBatch<T, P, B>& batch) {
#pragma unroll
  for (int r = 0; r < B; ++r) {
    load_words<P>(w.words + (first + r) * w.words_stride, batch.words[r]);
    batch.scales[r] = w.scales[(first + r) * w.scales_stride];
    batch.biases[r] = w.biases[(first + r) * w.biases_stride];
  }
}

// A weight times 2^bit_of(i), from what unpack_word made of integer i: with its own bias, since that of the middle
// would be rounded once more.
template <Format F>
inline float dequantized_weight(float q, int i, float scale, float bias) {
  return fma(q + zero_of<F>() / activation_scale<F>(i), scale, bias / activation_scale<F>(i));
}

// sums[m] = x[m, columns of the lane] * (scale * the integers of P words + bias)
template <Format F, int P, int M>
inline void multiply_weights(
    thread const Activations<P * 32 / bits_of<F>(), M>& a, thread const uint (&words)[P], float scale, float bias,
    uint two23, thread float (&sums)[M]) {
  clear(sums);
#pragma unroll
  for (int p = 0; p < P; ++p) {
    float q[32 / bits_of<F>()];
    unpack_word<F, true>(words[p], two23, q);
#pragma unroll
    for (int i = 0; i < word_size<F>(); ++i) {
      q[i] = dequantized_weight<F>(q[i], i, scale, bias);
    }
    add_products<F>(a, q, p, sums);
  }
}

// totals[r * M + m] = x[m, columns of the lane] * w[r, the same columns]
template <typename T, int bits, bool exact, int P, int M, int B>
inline void multiply(
    thread const Activations<P * 32 / bits, M>& a, thread const AffineBatch<T, P, B>& batch, uint two23,
    thread float (&totals)[B * M]) {
#pragma unroll
  for (int r = 0; r < B; ++r) {
    float sums[M];
    const float scale = float(batch.scales[r]);
    const float bias = float(batch.biases[r]);
    if constexpr (exact) {
      multiply_weights<affine<bits>(), P, M>(a, batch.words[r], scale, bias, two23, sums);
    } else {
      multiply_words<affine<bits>(), exact, P, M>(a, batch.words[r], two23, sums);
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
      totals[r * M + m] = exact ? sums[m] : scale * sums[m] + middle_bias<bits>(scale, bias) * a.sum[m];
    }
  }
}

// Lets rows first .. end pass by, B at a time; `batch` holds the first of them. The lanes past the last column only
// take part in the sums.
template <typename T, int bits, bool exact, int P, int M, int B>
inline void pass_rows(
    thread const Activations<P * 32 / bits, M>& a, bool inside, AffineWeights<T> w, thread AffineBatch<T, P, B>& batch,
    uint first, uint end, uint two23, PartialProducts to) {
  for (; first < end; first += B) {
    float totals[B * M];
    clear(totals);
    if (inside) {
      multiply<T, bits, exact, P, M, B>(a, batch, two23, totals);
      if (first + B < end) {
        load_batch<T, P, B>(w, first + B, batch);
      }
    }
    add_totals(totals, to, first * M);
  }
}

// Lets all `rows` rows pass by; those that fill no batch go one by one. `batch` holds the first, if there are B of
// them.
template <typename T, int bits, bool exact, int P, int M, int B>
inline void pass_all_rows(
    thread const Activations<P * 32 / bits, M>& a, bool inside, AffineWeights<T> w, thread AffineBatch<T, P, B>& batch,
    uint rows, uint two23, PartialProducts to) {
  const uint batched = rows / B * B;
  pass_rows<T, bits, exact, P, M, B>(a, inside, w, batch, 0, batched, two23, to);
  if (batched < rows) {
    AffineBatch<T, P, 1> last;
    if (inside) {
      load_batch<T, P, 1>(w, batched, last);
    }
    pass_rows<T, bits, exact, P, M, 1>(a, inside, w, last, batched, rows, two23, to);
  }
}

}  // namespace mittens
