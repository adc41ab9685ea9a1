// Rows of affine quantized weights passing by the activations that a lane holds: w[n, k] = scale * q[n, k] + bias,
// scale and bias shared by a group of k. A lane owns the columns that P words of a row hold, so that x is read once
// for many rows and a group costs two multiply-adds: scale * sum((q - middle) * x) + (bias + scale * middle) *
// sum(x). In float32 the weights themselves are multiplied: there the rounding of two large sums that cancel would
// show.
#pragma once

#include "matmul/nvidia/affine_weights.h"
#include "matmul/nvidia/products.h"
#include "params/matmul.h"

namespace mittens {

// A lane's loads of B rows.
template <typename T, int P, int B>
struct AffineBatch {
  uint words[B][P];
  T scales[B];
  T biases[B];
};

template <typename T, int P, int B>
inline void load_batch(AffineMatrix<T> w, uint first, thread AffineBatch<T, P, B>& batch) {
#pragma unroll
  for (int r = 0; r < B; ++r) {
    load_uints(w.words + (first + r) * w.words_stride, batch.words[r]);
    batch.scales[r] = w.scales[(first + r) * w.scales_stride];
    batch.biases[r] = w.biases[(first + r) * w.biases_stride];
  }
}

// sums[m] = x[m, columns of the lane] * (scale * the integers of P words + bias)
template <int bits, int P, int M>
inline void multiply_weights(
    thread const Activations<P * 32 / bits, M>& a, thread const uint (&words)[P], float scale, float bias, uint two23,
    thread float (&sums)[M]) {
  clear(sums);
#pragma unroll
  for (int p = 0; p < P; ++p) {
    float q[32 / bits];
    unpack_word<bits, true>(words[p], two23, q);
#pragma unroll
    for (int i = 0; i < 32 / bits; ++i) {
      q[i] = dequantized_weight<bits>(q[i], i, scale, bias);
    }
    add_products<bits>(a, q, p, sums);
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
      multiply_weights<bits, P, M>(a, batch.words[r], scale, bias, two23, sums);
    } else {
      multiply_words<bits, exact, P, M>(a, batch.words[r], two23, sums);
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
    thread const Activations<P * 32 / bits, M>& a, bool inside, AffineMatrix<T> w, thread AffineBatch<T, P, B>& batch,
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

// Goes through all `rows`; the rest that fills no batch goes one by one. `batch` holds the first, if there are B of
// them.
template <typename T, int bits, bool exact, int P, int M, int B>
inline void pass_all_rows(
    thread const Activations<P * 32 / bits, M>& a, bool inside, AffineMatrix<T> w, thread AffineBatch<T, P, B>& batch,
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
