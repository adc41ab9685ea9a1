// One row of x with 4-bit weights by 8x8 matrices, for GPUs whose tensor cores leave nothing else to do but to unpack:
// on an H200 that takes less than half the instructions of quantized_rows.h, whose kernels wait for these and not for
// memory.
//
// A left matrix has 8 outputs and, of each, four pairs of columns: one of each quarter of 128 columns. A right matrix
// has x's elements of these columns, and its own columns keep apart what must not be added up. Column 2 b + h is of
// half h of 128 columns, which has one scale: x's elements of the other half are zeros there. And b says which 128 of
// 512 columns its elements are of. The products of all 512 columns with it are summed up, those of each 128 in sums of
// their own, of which a lane wants one: where b is that of its own columns.
//
// So a lane loads 16 bytes of weights at a time, and scales and biases of two groups for 512 columns.
#pragma once

#include "mittens/integer_tiles.h"
#include "mittens/quantized_rows.h"

namespace mittens {

constant constexpr int row_step = 512;  // columns that a simdgroup takes at once
constant constexpr int row_quarters = 4;
constant constexpr int row_half = 64;

// The lane's share of R blocks of 8 outputs: 32 columns of each 128, and scales and biases of the halves of one of them.
template <typename T, int R>
struct RowWeights {
  uint words[R][row_quarters][4];
  vec<T, 2> scales[R];
  vec<T, 2> biases[R];
};

// w: of each block the matrix, from the lane's output on. What is past the last column has scale and bias 0.
template <typename T, int R>
inline void load_row_weights(
    thread const AffineWeights<T> (&w)[R], uint begin, uint columns, uint lane, uint group_shift,
    thread RowWeights<T, R>& to) {
  const uint quarter = tile_column(lane) / 2;
#pragma unroll
  for (int b = 0; b < row_quarters; ++b) {
    const uint column = begin + b * 128 + quarter * 32;
    const uint word = (column < columns ? column : 0) / 8;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      load_words(w[r].words + word, to.words[r][b]);
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    to.scales[r] = vec<T, 2>(T(0));
    to.biases[r] = vec<T, 2>(T(0));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint column = begin + quarter * 128 + h * row_half;
      if (column < columns) {
        to.scales[r][h] = w[r].scales[column >> group_shift];
        to.biases[r][h] = w[r].biases[column >> group_shift];
      }
    }
  }
}

// The lane's 16 elements of x, in the order of the words that they meet.
inline void load_row_activations(
    const device ushort* x, uint begin, uint columns, uint lane, thread uint (&to)[8]) {
  const uint column = begin + tile_column(lane) / 2 * 128 + tile_row(lane) / 2 * 32 + tile_row(lane) % 2 * 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint2 four = uint2(0);
    if (column < columns) {
      four = *(const device uint2*)(x + column + j * 8);
    }
    to[2 * j] = four.x;
    to[2 * j + 1] = four.y;
  }
}

// sums += w x over 512 columns; two23 is 2^23 as the bits of a float.
template <typename T, int R>
inline void add_row_step(
    thread const RowWeights<T, R>& weights, thread const uint (&x)[8], uint lane, uint two23,
    thread float (&sums)[R]) {
  const uint offset = integer_offset<T>(two23);
  const uint one = is_same_v<T, half> ? 0x0f000f00u : 0x0b800b80u;  // below 2^23 in both halves
  const vec<T, 2> ones = as_type<vec<T, 2>>((two23 | (two23 >> 16)) - one);
  const uint half_shift = tile_row(lane) / 4 * 16;
  Tile<float, R, row_quarters> products;
  float2 activations = float2(0.0f);
  fill(products, 0.0f);
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const uint word = x[j / 2];
    const vec<T, 2> right = as_type<vec<T, 2>>((j % 2 == 0 ? word & 0xffffu : word >> 16) << half_shift);
    activations = multiply_tiles<T>(ones, right, activations);
#pragma unroll
    for (int b = 0; b < row_quarters; ++b) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const vec<T, 2> left = nibble_pair<T>(weights.words[r][b][j / 4], j % 4, offset);
        products.at[r][b] = multiply_tiles<T>(left, right, products.at[r][b]);
      }
    }
  }
  const uint own = tile_column(lane) / 2;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float2 lower = own % 2 == 0 ? products.at[r][0] : products.at[r][1];
    const float2 upper = own % 2 == 0 ? products.at[r][2] : products.at[r][3];
    const float2 product = own < 2 ? lower : upper;
    const float2 scales = float2(weights.scales[r]);
    const float2 zeros = float2(weights.biases[r]) + tile_zero<T, 4>() * scales;
    sums[r] += scales.x * product.x + scales.y * product.y + zeros.x * activations.x + zeros.y * activations.y;
  }
}

// The products of a simdgroup's share of the columns, every so many steps of 512, left in partials[r * 8 + output].
template <typename T, int R>
inline void multiply_row(
    const device T* x, thread const AffineWeights<T> (&w)[R], constant QuantizedParams& params, uint lane,
    uint simdgroup, uint simdgroups, threadgroup float* partials) {
  float sums[R];
  clear(sums);
  for (uint begin = simdgroup * row_step; begin < params.columns; begin += simdgroups * row_step) {
    RowWeights<T, R> weights;
    uint activations[8];
    load_row_weights(w, begin, params.columns, lane, params.group_shift, weights);
    load_row_activations((const device ushort*)x, begin, params.columns, lane, activations);
    add_row_step(weights, activations, lane, params.two23, sums);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float sum = lanes_of_row_sum(sums[r]);
    if (tile_column(lane) == 0) {
      partials[r * 8 + tile_row(lane)] = sum;
    }
  }
}

// The matrix from output `output` on, which is the lane's.
template <typename T>
inline AffineWeights<T> at_output(AffineWeights<T> w, uint output) {
  w.words += size_t(output) * w.words_stride;
  w.scales += size_t(output) * w.scales_stride;
  w.biases += size_t(output) * w.biases_stride;
  return w;
}

}  // namespace mittens
