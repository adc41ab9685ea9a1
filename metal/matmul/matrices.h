// The schedule of products of up to 8 rows of x with rows of weights by 8x8 matrices, over the sources of
// matmul/row_products.h.
//
// A simdgroup has R blocks of 8 outputs of each of N sources. A matrix of weights is 8 outputs by 8 columns, one of
// activations 8 columns by 8 rows of x. Both are floats: on Apple GPUs their products take as long as halves', and
// weights need no sums of x beside them. Simdgroups of a threadgroup share out the columns.
//
// Columns meet by pairs (mittens/tile.h), half a run apart: a lane that holds a row of the activations loads
// neighbours, half a run of each of its two rows of x.
#pragma once

#include "matmul/row_products.h"
#include "matmul/splitk_mma.h"
#include "mittens/instantiate.h"
#include "mittens/tile.h"

namespace mittens {

// A run as floats: w[i] = scale[level(i)] * q[i] + bias[level(i)].
template <typename T, typename Source>
struct DequantizedRun {
  using Values = typename Source::Values;
  half q[Values::size];
  float scale[Values::levels];
  float bias[Values::levels];

  // q of a weight that is nothing but the bias.
  static constexpr float origin(int level) {
    return Source::has_bias ? Values::base : origin_of<Values>(level);
  }

  // In half types the origin is taken off the bias, whose rounding is small beside theirs.
  static constexpr bool origin_in_bias() {
    return !is_same_v<T, float> && Values::base != 0.0f;
  }

  float at(int i) const {
    const int level = Values::level(i);
    const float v = origin_in_bias() ? float(q[i]) : float(q[i]) - origin(level);
    return fma(v, scale[level], bias[level]);
  }
};

// Nothing but zeros where the run is not there.
template <typename T, typename Source>
inline DequantizedRun<T, Source> dequantized_run(typename Source::Run run, bool is_there) {
  using Result = DequantizedRun<T, Source>;
  using Values = typename Source::Values;
  Result result;
  Values::unpack(run.words, result.q);
  const float scale = is_there ? Source::scale(run) : 0.0f;
  const float bias = Source::has_bias && is_there ? Source::bias(run) : 0.0f;
#pragma unroll
  for (int level = 0; level < Values::levels; ++level) {
    result.scale[level] = scale * (1 / Values::factor(level));
    result.bias[level] = Result::origin_in_bias() ? fma(-Result::origin(level), result.scale[level], bias) : bias;
  }
  return result;
}

// sums[s * R + r] += block r of source s times x, over the sharer's columns. w: from the simdgroup's first output on;
// rows: of the lane's outputs.
template <int N, int R, typename T, typename Source>
inline void multiply_matrices(
    RowsOfX<T> x, thread const Source (&w)[N], thread const uint (&rows)[R], Sharing at,
    thread Tile<float, N * R, 1>& sums) {
  using Values = typename Source::Values;
  constexpr int half_run = Values::size / 2;
  constexpr uint width = 4 * Values::size;
  // Matrices of a sum. In float32 a step has several sums, as errors grow with the length of one.
  constexpr int chain = is_same_v<T, float> && !is_nvidia ? 2 : half_run;
  static_assert(width == kMatrixStep, "the plan counts with another step");
  const uint of_weights = tile_column(at.lane) / 2 * Values::size;
  const uint of_x = tile_row(at.lane) * half_run;
  const uint first = min(tile_column(at.lane), x.rows - 1) * x.columns + of_x;
  const uint second = min(tile_column(at.lane) + 1, x.rows - 1) * x.columns + of_x;
  for (uint begin = at.position / 32 * width; begin < x.columns; begin += at.sharers * width) {
    const uint column = begin + of_weights;
    const bool is_there = column < x.columns;
    typename Source::Run runs[N * R];
#pragma unroll
    for (int i = 0; i < N * R; ++i) {
      runs[i] = w[i / R].load(rows[i % R], 0, is_there ? column : 0);
    }
    typename ActivationOf<T>::type right[2][half_run];
    const bool x_is_there = begin + of_x < x.columns;
    if (x_is_there) {
      load_run<T>(x.x + (first + begin), right[0]);
      load_run<T>(x.x + (second + begin), right[1]);
    } else {
#pragma unroll
      for (int i = 0; i < half_run; ++i) {
        right[0][i] = right[1][i] = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < N * R; ++i) {
      const DequantizedRun<T, Source> run = dequantized_run<T, Source>(runs[i], is_there);
#pragma unroll
      for (int part = 0; part < half_run; part += chain) {
        float2 products = float2(0.0f);  // apart from the sums: in one long sum errors would grow
#pragma unroll
        for (int u = part; u < part + chain; ++u) {
          const float2 left = float2(run.at(first_of_pair<half_run>(u)), run.at(second_of_pair<half_run>(u)));
          products = multiply_tiles<float>(left, float2(float(right[0][u]), float(right[1][u])), products);
        }
        sums.at[i][0] += products;
      }
    }
  }
}

// sums[u] += x w over the sharer's rows of weights, every `apart` of 32 from `begin` to `end`, where w is [columns,
// outputs]. output: the first of the lane's run; its sums are of elements u and u + size / 2.
//
// A matrix of weights is 8 of its rows by 8 outputs. Matrix s of four takes rows s, s + 4, ... of 32, so that a lane
// loads neighbours of its row of x.
template <typename T, typename Source>
inline void multiply_transposed(
    RowsOfX<T> x, Source w, uint output, uint begin, uint end, uint apart, uint lane,
    thread Tile<float, 1, Source::Values::size / 2>& sums) {
  using Values = typename Source::Values;
  constexpr int half_run = Values::size / 2;
  constexpr int U = 4;
  const device T* row = x.x + min(tile_row(lane), x.rows - 1) * x.columns;
  for (; begin < end; begin += apart) {
    const uint first = begin + tile_row(lane) * U;
    typename Source::Run runs[U];
#pragma unroll
    for (int s = 0; s < U; ++s) {
      runs[s] = w.load(min(first + s, end - 1), 0, output);
    }
    T left[2 * U];
#pragma unroll
    for (int i = 0; i < 2 * U; ++i) {
      left[i] = T(0);
    }
    const uint column = begin + tile_column(lane) * U;
#pragma unroll
    for (int i = 0; i < 2 * U; ++i) {
      if (column + i < end) {
        left[i] = row[column + i];
      }
    }
#pragma unroll
    for (int s = 0; s < U; ++s) {
      const DequantizedRun<T, Source> run = dequantized_run<T, Source>(runs[s], first + s < end);
      const float2 pair = float2(float(left[s]), float(left[U + s]));
#pragma unroll
      for (int u = 0; u < half_run; ++u) {
        sums.at[0][u] = multiply_tiles<float>(pair, float2(run.at(u), run.at(u + half_run)), sums.at[0][u]);
      }
    }
  }
}

// The rows of x of a block of 8: past the last block only the last row, and nothing of it is written.
template <typename T>
inline RowsOfX<T> rows_of_block(const device T* x, uint rows, uint columns, uint first_row) {
  const uint start = min(first_row, rows - 1);
  return {x + size_t(start) * columns, columns, rows - start};
}

// Sums that the simdgroups of a threadgroup leave, for kMatrixOutputs outputs in all.
using MatrixPartials = TilePartials<kMatrixOutputs / 8, kMatrixRows / 8>;

// Writes the products of 8 rows of x from first_row on with kMatrixOutputs / N outputs from first_output on. x, y: from
// the first row on, which is row rows_before of all of y. width: threads that share the rows.
template <typename T, typename Source, int N>
inline void multiply_by_matrices(
    const device T* x, thread const Source (&w)[N], const device T* bias, device T* y, size_t rows_before,
    uint first_row, uint first_output, constant QuantizedParams& params, Sharing at, uint width,
    threadgroup float* all_partials) {
  constexpr int R = kMatrixOutputs / 8 / N;
  constexpr uint own_outputs = R * 8;
  using Partials = MatrixPartials;
  threadgroup float* partials = all_partials + at.block * at.sharers * (Partials::rows * Partials::row);
  const uint outputs = min(params.outputs - first_output, own_outputs);
  uint lane_outputs[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    lane_outputs[r] = min(r * 8 + tile_row(at.lane), outputs - 1);  // absent ones repeat the last
  }
  Source own[N];
#pragma unroll
  for (int s = 0; s < N; ++s) {
    own[s] = w[s].at(first_output, false);
  }
  Tile<float, N * R, 1> tile;
  fill(tile, 0.0f);
  multiply_matrices<N, R>(rows_of_block(x, params.rows, params.columns, first_row), own, lane_outputs, at, tile);

  leave_sums(tile, partials, at.position / 32, tile_row(at.lane), at.lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = at.position; i < Partials::rows * own_outputs; i += width) {
    const uint m = i / own_outputs;
    const uint n = i % own_outputs;
    if (first_row + m < params.rows && n < outputs) {
      float sums[N];
#pragma unroll
      for (int s = 0; s < N; ++s) {
        sums[s] = left_sum<Partials>(partials, s * own_outputs + n, m, at.sharers);
      }
      const uint output = first_output + n;
      y[(rows_before + first_row + m) * params.outputs + output] = epilogue(sums, bias, params, output);
    }
  }
}

}  // namespace mittens
