// A root mean square norm between two products of one row, without a launch of its own:
//
//   s[k] = y[k] + residual[k],   n = 1 / sqrt(mean_k(s[k]^2) + eps)
//   sum_k (s[k] * n * weight[k]) * w[j, k] = n * sum_k (s[k] * weight[k]) * w[j, k]
//
// The product that computes y writes s, s * weight in float32, and a sum of squares for each block of its outputs. The
// product that reads the norm takes s * weight for its row, adds up the squares, and applies n to its sums.
#pragma once

#include "matmul/row_products.h"
#include "mittens/rms.h"

namespace mittens {

template <typename T>
struct NormedRow {
  using Type = T;
  using Element = float;
  using Activation = float;
  const device float* x;  // s * weight, 16-byte aligned
  uint columns;

  uint offset(int, uint column, uint) const {
    return column;
  }
};

// The row's sums of squares, from the product before.
template <typename T>
struct SummedRow {
  const device T* residual;
  const device T* weight;
  device T* sum;
  device float* scaled;   // sum * weight
  device float* squares;  // of each block
};

// Writes the sums of a block of R outputs, of `all`, from the products that lanes hold after sum_of_sharers, rounded. All
// lanes take part.
template <int R, typename T>
inline void write_sums(SummedRow<T> row, T product, Sharing at, OwnOutputs outputs, uint block, uint all) {
  const uint output = outputs.first + at.lane / (32 / R);
  float square = 0;
  if (writes<R>(at, outputs, output)) {
    const T s = T(float(product) + float(row.residual[output]));
    row.sum[output] = s;
    row.scaled[output] = float(s) * float(row.weight[output]);
    square = float(s) * float(s);
  }
  square = simd_sum(square);
  if (at.position == 0 && outputs.own < all) {
    row.squares[block] = square;
  }
}

// n, for all lanes of a simdgroup.
inline float norm_of_row(const device float* squares, uint columns, constant NormParams& params, uint lane) {
  const uint tail = params.blocks % 4;
  float sum = lane < tail ? squares[params.blocks - tail + lane] : 0.0f;
  for (uint i = lane; i < params.blocks / 4; i += 32) {
    const float4 v = ((const device float4*)squares)[i];
    sum += (v.x + v.y) + (v.z + v.w);
  }
  return rstd(simd_sum(sum), columns, params.eps);
}

// A sum of products times n. Where the squares of numbers are infinite the norm is zeros, though a sum of its products
// may be infinite too.
template <typename T>
inline float normed_sum(float sum, float n, thread const NormedRow<T>& row, uint lane) {
  if constexpr (!is_same_v<T, half>) {
    if (n == 0.0f) {
      float zero = 0;
      for (uint column = lane; column < row.columns; column += 32) {
        zero = fma(row.x[column], 0.0f, zero);
      }
      return simd_sum(zero);
    }
  }
  return sum * n;
}

}  // namespace mittens
