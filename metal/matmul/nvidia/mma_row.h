// One row of x with 4-bit weights by 8x8 matrices, for GPUs whose tensor cores leave nothing else to do but to unpack:
// on an H200 that takes less than half the instructions of quantized_rows.h, whose kernels wait for these and not for
// memory.
//
// A left matrix has 8 outputs and, of each, four pairs of columns: one of each quarter of 128 columns. A right matrix
// has x's elements of these columns, and its own columns keep sums apart. Column 2 b + h is of half h of 128 columns,
// which has one scale: x's elements of the other half are zeros there. And b says which 128 of 512 columns its elements
// are of. The products of all 512 columns with it are summed up, each 128 in sums of their own; a lane wants the sum
// whose b is its own columns'.
//
// So a lane loads 16 bytes of weights at a time, and scales and biases of two groups for 512 columns. Each multiplied
// part is replaced by the next load, so that memory always has loads in flight.
#pragma once

#include "matmul/nvidia/rows.h"
#include "mittens/tile.h"
#include "params/matmul.h"

namespace mittens {

constant constexpr int row_blocks = kRowBlocks;
constant constexpr int row_step = kRowStep;
constant constexpr int row_quarters = 4;
constant constexpr int row_half = 64;

// The lane's share of the blocks: 32 columns of each 128, and scales and biases of the halves of one of them.
template <typename T>
struct RowWeights {
  uint words[row_blocks][row_quarters][4];
  vec<T, 2> scales[row_blocks];
  vec<T, 2> biases[row_blocks];
};

// Which of the columns that a simdgroup takes at once are there.
enum class Presence { all, some, none };

// Columns from `begin` on.
template <Presence presence>
struct RowColumns {
  uint begin;
  uint end;
};

template <Presence presence>
inline bool is_there(RowColumns<presence> columns, uint column) {
  return presence == Presence::all || (presence == Presence::some && column < columns.end);
}

// Of 128 of the columns. w: of each block the matrix, from the lane's output on. Words past the last column stay as they
// were: their scales and biases are 0.
template <Presence presence, typename T>
inline void load_row_words(
    thread const AffineMatrix<T> (&w)[row_blocks], RowColumns<presence> columns, uint lane, int b,
    thread RowWeights<T>& to) {
  const uint column = columns.begin + b * 128 + tile_column(lane) / 2 * 32;
  if (is_there(columns, column)) {
#pragma unroll
    for (int r = 0; r < row_blocks; ++r) {
      load_uints(w[r].words + column / 8, to.words[r][b]);
    }
  }
}

template <Presence presence, typename T>
inline void load_row_scales(
    thread const AffineMatrix<T> (&w)[row_blocks], RowColumns<presence> columns, uint lane, uint group_shift,
    thread RowWeights<T>& to) {
#pragma unroll
  for (int r = 0; r < row_blocks; ++r) {
    to.scales[r] = vec<T, 2>(T(0));
    to.biases[r] = vec<T, 2>(T(0));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint column = columns.begin + tile_column(lane) / 2 * 128 + h * row_half;
      if (is_there(columns, column)) {
        to.scales[r][h] = w[r].scales[column >> group_shift];
        to.biases[r][h] = w[r].biases[column >> group_shift];
      }
    }
  }
}

// The lane's 16 elements of x, in the order of the words that they meet.
template <Presence presence, typename T>
inline void load_row_activations(const device T* x, RowColumns<presence> columns, uint lane, thread uint (&to)[8]) {
  const uint column = columns.begin + tile_column(lane) / 2 * 128 + tile_row(lane) / 2 * 32 + tile_row(lane) % 2 * 4;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint2 four = uint2(0);
    if (is_there(columns, column)) {
      four = *(const device uint2*)(x + column + j * 8);
    }
    to[2 * j] = four.x;
    to[2 * j + 1] = four.y;
  }
}

// sums += w x over 512 columns. Multiplied columns are replaced by the columns `next`, which load while the rest is
// multiplied. two23 is 2^23 as the bits of a float.
template <Presence presence, typename T>
inline void add_row_step(
    thread RowWeights<T>& weights, thread uint (&x)[8], const device T* all,
    thread const AffineMatrix<T> (&w)[row_blocks], RowColumns<presence> next, constant QuantizedParams& params,
    uint lane, thread float (&sums)[row_blocks]) {
  const uint offset = integer_offset<T>(params.two23);
  const uint one = is_same_v<T, half> ? 0x0f000f00u : 0x0b800b80u;  // below 2^23 in both halves
  const vec<T, 2> ones = as_type<vec<T, 2>>((params.two23 | (params.two23 >> 16)) - one);
  const uint half_shift = tile_row(lane) / 4 * 16;
  const int own = tile_column(lane) / 2;
  vec<T, 2> right[16];
  float2 activations = float2(0.0f);
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const uint word = x[j / 2];
    right[j] = as_type<vec<T, 2>>((j % 2 == 0 ? word & 0xffffu : word >> 16) << half_shift);
    activations = multiply_tiles<T>(ones, right[j], activations);
  }
  load_row_activations(all, next, lane, x);
  float2 product[row_blocks];
#pragma unroll
  for (int b = 0; b < row_quarters; ++b) {
    Tile<float, row_blocks, 1> products;
    fill(products, 0.0f);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int r = 0; r < row_blocks; ++r) {
        const vec<T, 2> left = integer_pair<T, 4>(weights.words[r][b][j / 4], j % 4, offset);
        products.at[r][0] = multiply_tiles<T>(left, right[j], products.at[r][0]);
      }
    }
    load_row_words(w, next, lane, b, weights);
    simdgroup_barrier(mem_flags::mem_none);  // compilers would put the loads off
#pragma unroll
    for (int r = 0; r < row_blocks; ++r) {
      product[r] = b == 0 || own == b ? products.at[r][0] : product[r];
    }
  }
#pragma unroll
  for (int r = 0; r < row_blocks; ++r) {
    const float2 scales = float2(weights.scales[r]);
    const float2 zeros = float2(weights.biases[r]) + tile_zero<T, 4>() * scales;
    sums[r] += scales.x * product[r].x + scales.y * product[r].y + zeros.x * activations.x + zeros.y * activations.y;
  }
  load_row_scales(w, next, lane, params.group_shift, weights);
}

// The products of a simdgroup's share of the columns, steps of 512 dealt in turn, left in partials[r * 8 + output].
template <typename T>
inline void multiply_row(
    const device T* x, thread const AffineMatrix<T> (&w)[row_blocks], constant QuantizedParams& params, uint lane,
    uint simdgroup, uint simdgroups, threadgroup float* partials) {
  const uint columns = params.columns;
  float sums[row_blocks];
  clear(sums);
  RowWeights<T> weights = {};
  uint activations[8];
  uint begin = simdgroup * row_step;
  const RowColumns<Presence::some> first = {begin, columns};
#pragma unroll
  for (int b = 0; b < row_quarters; ++b) {
    load_row_words(w, first, lane, b, weights);
  }
  load_row_activations(x, first, lane, activations);
  load_row_scales(w, first, lane, params.group_shift, weights);
  const uint apart = simdgroups * row_step;
  for (; begin + apart + row_step <= columns; begin += apart) {
    const RowColumns<Presence::all> next = {begin + apart, columns};
    add_row_step(weights, activations, x, w, next, params, lane, sums);
  }
  if (begin + apart < columns) {
    const RowColumns<Presence::some> next = {begin + apart, columns};
    add_row_step(weights, activations, x, w, next, params, lane, sums);
    begin += apart;
  }
  if (begin < columns) {
    const RowColumns<Presence::none> next = {begin, columns};
    add_row_step(weights, activations, x, w, next, params, lane, sums);
  }
#pragma unroll
  for (int r = 0; r < row_blocks; ++r) {
    const float sum = lanes_of_row_sum(sums[r]);
    if (tile_column(lane) == 0) {
      partials[r * 8 + tile_row(lane)] = sum;
    }
  }
}

}  // namespace mittens
