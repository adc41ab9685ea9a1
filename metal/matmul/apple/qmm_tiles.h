// The schedule of products of many rows of x with rows of weights by 8x8 matrices, over the sources of
// matmul/row_products.h.
//
// A threadgroup has 8 MB rows of x and, of each of N sources, 8 NB outputs for each of its simdgroups, which multiply
// all of the rows with outputs of their own. So only x goes through threadgroup memory, and weights are unpacked once
// for all rows, in the registers of the lane that multiplies them.
//
// A step is eight runs of columns, which meet by singles (mittens/tile.h): the lanes that hold row r of the
// right-hand matrices load run r of two outputs. x is staged with the elements of two runs in turn, so that a lane loads
// neighbours. A step may be staged in parts, the same elements of each run.
//
// Weights for halves are multiplied as halves where these have their range; all others as floats, so that bfloat16 is
// widened once, when x is staged.
#pragma once

#include "matmul/row_products.h"
#include "mittens/source/affine.h"
#include "mittens/source/dense.h"
#include "mittens/tile.h"

// Where a thread of tiles is, as parameters of its kernel.
#define thread_of_tiles                           \
  uint3 group [[threadgroup_position_in_grid]],   \
  uint thread_at [[thread_index_in_threadgroup]], \
  uint lane [[thread_index_in_simdgroup]]

namespace mittens {

template <typename T, typename Source>
struct TileOperand {
  using Values = typename Source::Values;
  static constant constexpr bool halves = is_same_v<T, half> && Source::fits_half;
  using type = conditional_t<halves, half, float>;
  static constant constexpr int part = halves && Values::size > 4 ? 8 : 4;  // elements of a run staged at once
  static constant constexpr int parts = Values::size / part;                // of a step
  static constant constexpr int step = 8 * Values::size;                    // columns
  static constant constexpr int row = 8 * part + 4;  // of staged x, so far apart that few banks meet
};

// Elements from `first` on of a run of each of two rows, as Values::unpack leaves them. Where a run is one word its halves
// hold neighbours: the same halves of both runs are unpacked together, so that nothing else of them is kept for later.
template <typename Values, int part>
inline void unpack_part(typename Values::Words even, typename Values::Words odd, int first, thread half (&q)[2][part]) {
  constexpr int half_run = Values::size / 2;
  half of_even[Values::size];
  half of_odd[Values::size];
  if constexpr (sizeof(typename Values::Words) == 4 && part <= half_run) {
    typename Values::Words both;
    both.at[0] = side_by_side(even.at[0], odd.at[0], first >= half_run);
    Values::unpack(both, of_even);
#pragma unroll
    for (int i = 0; i < part; ++i) {
      q[0][i] = of_even[first % half_run + i];
      q[1][i] = of_even[first % half_run + half_run + i];
    }
  } else {
    Values::unpack(even, of_even);
    Values::unpack(odd, of_odd);
#pragma unroll
    for (int i = 0; i < part; ++i) {
      q[0][i] = of_even[first + i];
      q[1][i] = of_odd[first + i];
    }
  }
}

// Makes weights of a run that Values::unpack has unpacked. Zeros past the last run.
template <typename T, typename Source>
struct TileWeights {
  using Values = typename Source::Values;
  using U = typename TileOperand<T, Source>::type;
  U scale;
  U bias;

  static TileWeights of(typename Source::Run run, bool is_there) {
    const float of_run = Source::scale(run);
    TileWeights result;
    result.scale = is_there ? U(Source::has_bias ? of_run : of_run * (1 / Values::factor(0))) : U(0);
    result.bias = Source::has_bias && is_there ? U(Source::bias(run)) : U(0);
    return result;
  }

  U at(half q, int i) const {
    if constexpr (Source::has_bias) {
      const float unit = 1 / Values::factor(Values::level(i));
      return fma(U(fma(q, half(unit), half(-Values::base * unit))), scale, bias);
    } else if constexpr (Values::base != 0.0f) {
      return U(q - half(origin_of<Values>(0))) * scale;
    } else {
      return U(q) * scale;
    }
  }
};

// A lane's part of right-hand matrices: a part of two runs.
template <typename T, typename Source>
inline void right_part(
    typename Source::Run even, typename Source::Run odd, bool is_there, int first,
    thread vec<typename TileOperand<T, Source>::type, 2> (&right)[TileOperand<T, Source>::part]) {
  using Operand = TileOperand<T, Source>;
  if constexpr (IsDense<Source>::value) {
#pragma unroll
    for (int i = 0; i < Operand::part; ++i) {
      using Pair = vec<typename Operand::type, 2>;
      right[i] = is_there ? Pair(Source::element(even, first + i), Source::element(odd, first + i)) : Pair(0);
    }
  } else {
    half q[2][Operand::part];
    unpack_part<typename Source::Values>(even.words, odd.words, first, q);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const TileWeights<T, Source> weights = TileWeights<T, Source>::of(row == 0 ? even : odd, is_there);
#pragma unroll
      for (int i = 0; i < Operand::part; ++i) {
        right[i][row] = weights.at(q[row][i], first + i);
      }
    }
  }
}

template <typename U, typename T>
inline vec<U, 4> four_of(const device T* x, uint index) {
  if constexpr (is_same_v<T, bfloat>) {
    const uint2 bits = ((const device uint2*)x)[index];
    return as_type<float4>(uint4(bits.x << 16, bits.x & 0xffff0000u, bits.y << 16, bits.y & 0xffff0000u));
  } else {
    return vec<U, 4>(((const device vec<T, 4>*)x)[index]);
  }
}

// A thread's share of the staging of each part: four elements of two runs, of one row or several.
template <typename T, typename Source, int MB, int simdgroups = kTileSimdgroups>
struct Staging {
  using Operand = TileOperand<T, Source>;
  using U = typename Operand::type;
  static constant constexpr int size = Source::Values::size;
  static constant constexpr int fours = Operand::part;            // of a row, of two runs at once
  static constant constexpr int apart = 32 * simdgroups / fours;  // rows of a thread
  static constant constexpr int rows = (8 * MB + apart - 1) / apart;

  const device T* x;
  uint from[rows];  // fours from x to the first of the rows; those past the last are that one
  uint column;      // of the first run
  threadgroup vec<U, 4>* to;

  bool has_all;  // whether the last of the rows is there for this thread too

  // Row i of a thread, of the tile's.
  static uint row_of(uint thread_at, int i) {
    return thread_at / fours + i * apart;
  }

  // All but where the rows are.
  static Staging of(const device T* x, threadgroup U* staged, uint thread_at) {
    const uint pair = thread_at % fours / (fours / 4);
    const uint four = thread_at % (fours / 4);
    Staging result;
    result.x = x;
    result.column = pair * (2 * size) + 4 * four;
    result.to = (threadgroup vec<U, 4>*)(staged + row_of(thread_at, 0) * Operand::row + pair * (2 * fours) + 8 * four);
    result.has_all = 8 * MB % apart == 0 || row_of(thread_at, rows - 1) < 8 * MB;
    return result;
  }

  static Staging of(RowsOfX<T> x, threadgroup U* staged, uint thread_at) {
    Staging result = of(x.x, staged, thread_at);
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      result.from[i] = (min(row_of(thread_at, i), x.rows - 1) * x.columns + result.column) / 4;
    }
    return result;
  }

  // The part from element `first` of each run on. tail: with zeros past the last of `columns`.
  template <bool tail>
  void stage(uint begin, uint first, uint columns) const {
    const uint at = begin + first;
    const bool has_first = !tail || at + column < columns;
    const bool has_second = !tail || at + column + size < columns;
#pragma unroll
    for (int i = 0; i < rows; ++i) {
      if (i + 1 < rows || has_all) {
        vec<U, 4> a = vec<U, 4>(U(0));
        vec<U, 4> b = vec<U, 4>(U(0));
        if (has_first) {
          a = four_of<U>(x, from[i] + at / 4);
        }
        if (has_second) {
          b = four_of<U>(x, from[i] + at / 4 + size / 4);
        }
        to[i * apart * Operand::row / 4] = vec<U, 4>(a.x, b.x, a.y, b.y);
        to[i * apart * Operand::row / 4 + 1] = vec<U, 4>(a.z, b.z, a.w, b.w);
      }
    }
  }
};

// The columns of x that a threadgroup has. shares: others may have other columns; then are_parts says so, and y takes
// sums in float32.
//   next       the first column of a step that is multiplied, from one on
//   scale      the factor of its products
//   finish     the last step of the sums
template <bool shares>
struct TileColumns {
  static constant constexpr bool are_scaled = false;
  uint end;
  uint first;
  bool are_shared;

  uint begin() const {
    return shares ? first : 0;
  }
  bool are_parts() const {
    return shares && are_shared;
  }
  static uint next(uint column) {
    return column;
  }
  static float scale(uint) {
    return 1;
  }
  template <int R, int C>
  static void finish(thread Tile<float, R, C>&) {}
};

// sums.at[i][s * NB + j] = rows of block i of x times outputs of block j of source s. output: the lane's first.
template <int N, int MB, int NB, typename T, typename Source, typename Columns, int simdgroups>
inline void multiply_staged(
    thread const Staging<T, Source, MB, simdgroups>& staging, Columns of_x, thread const Source (&w)[N], uint output,
    threadgroup typename TileOperand<T, Source>::type* staged, uint lane, thread Tile<float, MB, N * NB>& sums) {
  using Operand = TileOperand<T, Source>;
  using U = typename Operand::type;
  constexpr int part = Operand::part;
  // Float32 would show the errors of one long sum.
  constexpr bool are_apart = is_same_v<T, float> || Columns::are_scaled;
  // Whole steps have a loop of their own where registers suffice: it asks nothing of runs.
  constexpr int loops = sizeof(T) == 2 && N == 1 && MB == 8 && IsAffine<Source>::value ? 2 : 1;
  const uint columns = of_x.end;
  const uint run = tile_row(lane) * Source::Values::size;
  const threadgroup U* own_row = staged + tile_row(lane) * Operand::row + tile_column(lane) * part;
  fill(sums, 0.0f);
  uint begin = of_x.next(of_x.begin());
#pragma unroll
  for (int loop = 0; loop < loops; ++loop) {
    const bool is_whole = loop + 1 < loops;
    for (; is_whole ? begin + Operand::step <= columns : begin < columns; begin = of_x.next(begin + Operand::step)) {
      const float scale = of_x.scale(begin);
      const uint column = begin + run;
      const bool is_there = column < columns;
      typename Source::Run runs[N * NB][2];
#pragma unroll
      for (int j = 0; j < N * NB; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint more = j % NB * 8 + i;
          if constexpr (loops == 2) {
            // Also of whole steps: of a choice the compiler makes one place for all rows, and no product for each.
            runs[j][i] = w[j / NB].from_place(output, column, is_there).load(0, more, 0);
          } else {
            runs[j][i] = w[j / NB].load(output, more, is_there ? column : 0);
          }
        }
      }
#pragma unroll
      for (int first = 0; first < Source::Values::size; first += part) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (is_whole || begin + Operand::step <= columns) {
          staging.template stage<false>(begin, first, columns);
        } else {
          staging.template stage<true>(begin, first, columns);
        }
        vec<U, 2> right[N * NB][part];
#pragma unroll
        for (int j = 0; j < N * NB; ++j) {
          right_part<T, Source>(runs[j][0], runs[j][1], is_whole || is_there, first, right[j]);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
        for (int i = 0; i < MB; ++i) {
          float2 products[N * NB];
#pragma unroll
          for (int j = 0; j < N * NB; ++j) {
            products[j] = are_apart ? float2(0.0f) : sums.at[i][j];
          }
#pragma unroll
          for (int u = 0; u < part; u += 2) {
            const vec<U, 4> left = *(const threadgroup vec<U, 4>*)(own_row + i * 8 * Operand::row + 2 * u);
#pragma unroll
            for (int j = 0; j < N * NB; ++j) {
              products[j] = multiply_tiles<U>(left.xy, right[j][u], products[j]);
              products[j] = multiply_tiles<U>(left.zw, right[j][u + 1], products[j]);
            }
          }
#pragma unroll
          for (int j = 0; j < N * NB; ++j) {
            if constexpr (Columns::are_scaled) {
              sums.at[i][j] += scale * products[j];
            } else {
              sums.at[i][j] = are_apart ? sums.at[i][j] + products[j] : products[j];
            }
          }
        }
      }
    }
  }
}

// Writes the products of 8 MB rows of x with the outputs of a threadgroup, of 8 NB or more in all. x, y: from the first
// row on.
template <
    int N, int MB, int NB, int simdgroups = kTileSimdgroups, typename T, typename Source, typename Params,
    typename Columns>
inline void multiply_by_tiles(
    RowsOfX<T> x, thread const Source (&w)[N], const device T* bias, device T* y, uint first_output,
    constant Params& params, threadgroup typename TileOperand<T, Source>::type* staged, uint thread_at, uint lane,
    Columns columns) {
  const uint own = first_output + thread_at / 32 * (8 * NB);
  const uint output = min(own, params.outputs - 8 * NB) + tile_column(lane);  // those before `own` are another's
  Tile<float, MB, N * NB> tile;
  const auto staging = Staging<T, Source, MB, simdgroups>::of(x, staged, thread_at);
  multiply_staged<N, MB, NB>(staging, columns, w, output, staged, lane, tile);
  columns.finish(tile);
#pragma unroll
  for (int i = 0; i < MB; ++i) {
    const uint m = i * 8 + tile_row(lane);
#pragma unroll
    for (int j = 0; j < NB; ++j) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint n = output + j * 8 + k;
        if (m < x.rows && n >= own) {
          float sums[N];
#pragma unroll
          for (int s = 0; s < N; ++s) {
            sums[s] = tile.at[i][s * NB + j][k];
          }
          if (columns.are_parts()) {
            ((device float*)y)[m * params.outputs + n] = sums[0];
          } else {
            y[m * params.outputs + n] = epilogue(sums, bias, params, n);
          }
        }
      }
    }
  }
}

}  // namespace mittens
