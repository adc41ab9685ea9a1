// The schedule of products of many rows of x with weights [columns, outputs] by 8x8 matrices, over the sources of
// matmul/row_products.h.
//
// A simdgroup has 8 MB rows of x and four runs of outputs, so that each of the four lanes that hold a row of a
// right-hand matrix loads and unpacks a run of its own, and matrix j has elements 2 j and 2 j + 1 of each run. Simdgroups
// of a threadgroup share x, which is staged as in matmul/apple/qmm_tiles.h but in order: a lane loads four neighbours of
// a row, for two left-hand matrices.
#pragma once

#include "matmul/apple/qmm_tiles.h"

namespace mittens {

// How a threadgroup with `rows` rows of x divides its outputs.
template <typename T, typename Source, int rows, int simdgroups = kTileSimdgroups>
struct TransposedTile {
  using U = typename TileOperand<T, Source>::type;
  static constant constexpr int size = Source::Values::size;
  static constant constexpr int NB = size / 2;
  static constant constexpr int MB = size == 8 && simdgroups == kTileSimdgroups ? 4 : 2;
  static constant constexpr int along_rows = rows / (8 * MB);                    // simdgroups
  static constant constexpr int outputs = simdgroups / along_rows * (4 * size);  // of the threadgroup
  static constant constexpr bool is_dense = IsDense<Source>::value;
  static constant constexpr bool is_wide = is_dense && sizeof(typename Source::Run) > 16;
  static constant constexpr bool is_long = !is_dense && TileOperand<T, Source>::halves && size == 8;
  static constant constexpr int step = is_long ? 64 : is_wide ? 16 : 32;  // rows of weights
  static constant constexpr int row = step + 4;                           // of staged x
};

// Stages `step` columns of x. whole: x has rows of whole fours, and all of the columns.
template <typename T, typename Source, int rows, int simdgroups>
inline void stage_in_order(
    RowsOfX<T> x, uint begin, bool whole, threadgroup typename TileOperand<T, Source>::type* staged, uint thread_at) {
  using Shape = TransposedTile<T, Source, rows, simdgroups>;
  using U = typename Shape::U;
  constexpr int fours = Shape::step / 4;
  constexpr int apart = 32 * simdgroups / fours;  // rows of a thread
  const uint row = thread_at / fours;
  const uint column = begin + thread_at % fours * 4;
  threadgroup vec<U, 4>* to = (threadgroup vec<U, 4>*)(staged + row * Shape::row) + thread_at % fours;
#pragma unroll
  for (int i = 0; i < rows / apart; ++i) {
    const uint first = min(row + i * apart, x.rows - 1) * x.columns + column;
    vec<U, 4> four = vec<U, 4>(U(0));
    if (whole) {
      four = four_of<U>(x.x, first / 4);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (column + k < x.columns) {
          four[k] = U(x.x[first + k]);
        }
      }
    }
    to[i * apart * Shape::row / 4] = four;
  }
}

// A lane's part of right-hand matrices: a run.
template <typename T, typename Source>
inline void right_run(
    Source, typename Source::Run run, bool is_there,
    thread vec<typename TileOperand<T, Source>::type, 2> (&right)[Source::Values::size / 2]) {
  constexpr int size = Source::Values::size;
  if constexpr (IsDense<Source>::value) {
#pragma unroll
    for (int i = 0; i < size; ++i) {
      right[i / 2][i % 2] = is_there ? Source::element(run, i) : 0.0f;
    }
  } else {
    half q[size];
    Source::Values::unpack(run.words, q);
    const TileWeights<T, Source> weights = TileWeights<T, Source>::of(run, is_there);
#pragma unroll
    for (int i = 0; i < size; ++i) {
      right[i / 2][i % 2] = weights.at(q[i], i);
    }
  }
}

// sums.at[i][j] = rows of block i of x times outputs of block j. output: the first of the lane's run. own_row: of staged
// x, the simdgroup's first.
template <int rows, int simdgroups, int MB, int NB, typename T, typename Source, typename Columns>
inline void multiply_transposed_staged(
    RowsOfX<T> x, Source w, uint output, uint own_row, threadgroup typename TileOperand<T, Source>::type* staged,
    uint thread_at, uint lane, Columns of_x, thread Tile<float, MB, NB>& sums) {
  using Shape = TransposedTile<T, Source, rows, simdgroups>;
  using U = typename Shape::U;
  constexpr int count = Shape::step / 8;  // matrices of a step
  // Float32 would show the errors of one long sum.
  constexpr bool are_apart = is_same_v<T, float> || Columns::are_scaled;
  const uint own = tile_row(lane) / 2 * 4 + tile_row(lane) % 2;
  const threadgroup U* left_row = staged + (own_row + tile_row(lane)) * Shape::row + tile_column(lane) * 2;
  fill(sums, 0.0f);
  for (uint begin = of_x.next(0); begin < of_x.end; begin = of_x.next(begin + Shape::step)) {
    const float scale = of_x.scale(begin);
    typename Source::Run runs[count];
    const bool whole = begin + Shape::step <= x.columns;
#pragma unroll
    for (int u = 0; u < count; ++u) {
      const uint more = u / 2 * 16 + u % 2 * 2;
      runs[u] = whole ? w.load(begin + own, more, output) : w.load(min(begin + own + more, x.columns - 1), 0, output);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    stage_in_order<T, Source, rows, simdgroups>(x, begin, whole && x.columns % 4 == 0, staged, thread_at);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Tile<float, MB, NB> products;
    if constexpr (are_apart) {
      fill(products, 0.0f);
    } else {
      products = sums;
    }
#pragma unroll
    for (int u = 0; u < count; u += 2) {
      vec<U, 2> right[2][NB];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        right_run<T>(w, runs[u + k], begin + own + (u / 2 * 16 + k * 2) < x.columns, right[k]);
      }
#pragma unroll
      for (int i = 0; i < MB; ++i) {
        const vec<U, 4> left = *(const threadgroup vec<U, 4>*)(left_row + i * 8 * Shape::row + u * 8);
#pragma unroll
        for (int j = 0; j < NB; ++j) {
          products.at[i][j] = multiply_tiles<U>(left.xy, right[0][j], products.at[i][j]);
        }
#pragma unroll
        for (int j = 0; j < NB; ++j) {
          products.at[i][j] = multiply_tiles<U>(left.zw, right[1][j], products.at[i][j]);
        }
      }
    }
    if constexpr (Columns::are_scaled) {
      multiply(products, scale);
    }
    if constexpr (are_apart) {
      add(sums, products);
    } else {
      sums = products;
    }
  }
}

// Writes the products of `rows` rows of x with Shape::outputs outputs from first_output on. x, y: from the first row
// on.
template <int rows, int simdgroups = kTileSimdgroups, typename T, typename Source, typename Params, typename Columns>
inline void multiply_by_transposed_tiles(
    RowsOfX<T> x, Source w, const device T* bias, device T* y, uint first_output, constant Params& params,
    threadgroup typename TileOperand<T, Source>::type* staged, uint thread_at, uint lane, Columns of_x) {
  using Shape = TransposedTile<T, Source, rows, simdgroups>;
  constexpr int MB = Shape::MB;
  constexpr int NB = Shape::NB;
  const uint simdgroup = thread_at / 32;
  const uint own_row = simdgroup % Shape::along_rows * (8 * MB);
  const uint output =
      first_output + simdgroup / Shape::along_rows * (4 * Shape::size) + tile_column(lane) / 2 * Shape::size;
  const bool is_there = output < params.outputs;
  Tile<float, MB, NB> tile;
  multiply_transposed_staged<rows, simdgroups>(
      x, w, is_there ? output : 0, own_row, staged, thread_at, lane, of_x, tile);
  of_x.finish(tile);
#pragma unroll
  for (int i = 0; i < MB; ++i) {
    const uint m = own_row + i * 8 + tile_row(lane);
#pragma unroll
    for (int j = 0; j < NB; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint n = output + j * 2 + k;
        if (is_there && m < x.rows) {
          const float sums[1] = {tile.at[i][j][k]};
          y[m * params.outputs + n] = epilogue(sums, bias, params, n);
        }
      }
    }
  }
}

}  // namespace mittens
