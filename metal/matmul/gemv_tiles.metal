// Products of several rows of x with a dense matrix, by 8x8 matrices, sums in float32 (csrc/ops/matmul/plan.cpp says
// from how many rows on):
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n]
//
// A matrix of weights is 8 outputs by 8 columns, one of x 8 columns by 8 rows. The simdgroups of a threadgroup share
// out the columns of x for N blocks of 8 outputs, so that each weight is read once; where outputs are few, several
// threadgroups do, and matmul/splitk_reduce.metal adds up their sums.
//
// A load takes four rows of weights, 128 bytes each, the halves of a row by the four lanes of a row of matrices each.
// Two such loads give each lane one half of two rows; neighbouring rows of lanes then swap one for the other, so that
// each has both halves of one row. Columns meet by pairs (mittens/tile.h), half of the 16 bytes that a lane has apart.
//
// All that a simdgroup takes at once is on its way before anything is multiplied. On an H200 it is this that decides,
// and how much of x is loaded beside the weights: 8 rows of 4096 to 14336 in half types took 35 us instead of 31 with
// half the loads on their way. Many outputs let a threadgroup have 32, so that half as much of x is loaded
// (gemv_tiles_shape in csrc/ops/matmul/plan.cpp). Neighbours begin with other columns: where all threadgroups went over
// the same ones at a time, the same took 30.1 us instead of 29.3.
//
// Rows of both start on 16 bytes, and a threadgroup's outputs are all there: the last one begins where that is so, and
// repeats outputs of the one before it. matmul/gemv.metal takes all other shapes.
#include <metal_stdlib>

#include "matmul/splitk.h"
#include "matmul/splitk_mma.h"
#include "mittens/instantiate.h"
#include "mittens/pack.h"
#include "mittens/source/dense.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

constant constexpr int tile = 8;

// Matrices of 8 columns in a half run, which the loads of four lanes fill.
template <typename T>
constexpr int depth() {
  return pack_size<T>() / 2;
}

// Columns of a run: a load of a row.
template <typename T>
constexpr int run() {
  return kGemvRunBytes / sizeof(T);
}

// The output, of a block of 8, that a row of a matrix stands for.
inline uint output_of(uint row) {
  return row % 2 * 4 + row / 2;
}

// A lane's loads of a run of a block's weights: a half run of two outputs, and then both of one.
template <typename T>
struct LaneWeights {
  typename Dense<T>::Run halves[2];
};

// A lane's right operands of a half run.
template <typename T, int MB>
struct LaneRows {
  vec<T, 2> at[depth<T>()][MB];
};

// left: columns from the lane's first one on. whole: all of them are there.
template <bool whole, typename T, int N, int U>
inline void load_weights(Dense<T> w, int left, thread LaneWeights<T> (&to)[U][N]) {
#pragma unroll
  for (int i = 0; i < U; ++i) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        to[i][n].halves[h].at[0] = uint4(0);
        if (whole || i * run<T>() < left) {
          to[i][n].halves[h] = w.load(0, n * tile + h * tile / 2, i * run<T>());
        }
      }
    }
  }
}

template <typename T>
inline void swap_halves(thread LaneWeights<T>& weights, bool odd) {
  thread uint4& first = weights.halves[0].at[0];
  thread uint4& second = weights.halves[1].at[0];
  const uint4 other = simd_shuffle_xor(odd ? first : second, tile_lane(1, 0));
  first = odd ? other : first;
  second = odd ? second : other;
}

// Rows past the last repeat it: nobody reads their results.
template <bool whole, typename T, int MB, int H>
inline void load_rows(
    const device T* x, uint rows, uint columns, int left, uint lane, thread LaneRows<T, MB> (&to)[H]) {
  constexpr int E = depth<T>();
#pragma unroll
  for (int h = 0; h < H; ++h) {
#pragma unroll
    for (int block = 0; block < MB; ++block) {
      vec<T, E> row[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        row[j] = vec<T, E>(T(0));
        if (whole || h * tile * E < left) {
          const uint m = min(block * tile + tile_column(lane) + j, rows - 1);
          row[j] = *(const device vec<T, E>*)(x + m * columns + h * tile * E);
        }
      }
#pragma unroll
      for (int t = 0; t < E; ++t) {
        to[h].at[t][block] = vec<T, 2>(row[0][t], row[1][t]);
      }
    }
  }
}

// sums += w x over U runs from column `begin` on, or as many as there are.
template <bool whole, int U, typename T, int N, int MB>
inline void add_runs(
    const device T* x, const device T* w, uint stride, uint begin, uint end, uint rows, uint columns, uint lane,
    thread Tile<float, N, MB>& sums) {
  constexpr int E = depth<T>();
  const bool odd = tile_row(lane) % 2;
  const uint weight = begin + (odd ? tile * E : 0) + tile_column(lane) * E;
  const uint column = begin + tile_row(lane) * E;
  LaneWeights<T> weights[U][N];
  LaneRows<T, MB> activations[2 * U];
  load_weights<whole>(Dense<T>::of(w + weight, stride), int(end) - int(weight), weights);
  load_rows<whole>(x + column, rows, columns, int(end) - int(column), lane, activations);
#pragma unroll
  for (int i = 0; i < U; ++i) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      swap_halves(weights[i][n], odd);
    }
  }
#pragma unroll
  for (int h = 0; h < 2 * U; ++h) {
#pragma unroll
    for (int t = 0; t < E; ++t) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const vec<T, 2> pair = Dense<T>::template pair<E>(weights[h / 2][n].halves[h % 2], t);
#pragma unroll
        for (int block = 0; block < MB; ++block) {
          sums.at[n][block] = multiply_tiles<T>(pair, activations[h].at[t][block], sums.at[n][block]);
        }
      }
    }
  }
}

// most: threads by which NVIDIA's compiler allots registers.
template <typename T, int MB, int N, int most>
[[kernel, threads_at_most(256, most)]] void gemv_tiles(
    const device T* x [[buffer(0)]],     // [rows, columns]
    const device T* w [[buffer(1)]],     // [outputs, columns]
    const device T* bias [[buffer(2)]],  // [outputs]
    device T* y [[buffer(3)]],           // [rows, outputs], or float [splits, rows, outputs]
    constant GemvParams& params [[buffer(4)]], thread_of_simdgroups) {
  using Partials = TilePartials<N, MB>;
  constexpr int U = gemv_runs(Partials::rows, Partials::outputs);
  constexpr uint width = U * run<T>();
  threadgroup float partials[Partials::all];
  const uint last_output = params.outputs - Partials::outputs;
  const uint first_output = min(group.x * Partials::outputs, last_output);
  const uint repeated = group.x * Partials::outputs - first_output;  // outputs that the threadgroup before has, too
  const uint first_row = group.y * Partials::rows;
  const uint rows = min(params.rows - first_row, uint(Partials::rows));
  const uint end = min(group.z * params.columns_per_split + params.columns_per_split, params.columns);
  x += size_t(first_row) * params.columns;
  w += size_t(first_output + tile_row(lane) / 2) * params.weight_stride;

  Tile<float, N, MB> sums;
  fill(sums, 0.0f);
  const uint first = group.z * params.columns_per_split + simdgroup * width;
  uint round = group.x & params.round_mask;
  for (uint i = 0; i < params.rounds; ++i) {
    const uint begin = first + round * simdgroups * width;
    round = round + 1 < params.rounds ? round + 1 : 0;
    if (begin + width <= end) {
      add_runs<true, U>(x, w, params.weight_stride, begin, end, rows, params.columns, lane, sums);
    } else {
      for (uint last = begin; last < end; last += run<T>()) {
        add_runs<false, 1>(x, w, params.weight_stride, last, end, rows, params.columns, lane, sums);
      }
    }
  }

  leave_sums(sums, partials, simdgroup, output_of(tile_row(lane)), lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const SplitPlace place{group.z, params.splits, size_t(params.rows) * params.outputs, params.has_bias != 0};
  for (uint i = t; i < Partials::rows * Partials::outputs; i += simdgroups * 32) {
    const uint m = i / Partials::outputs;
    const uint n = i % Partials::outputs;
    if (m < rows && n >= repeated) {
      const float sum = left_sum<Partials>(partials, n, m, simdgroups);
      const uint output = first_output + n;
      store_split(y, size_t(first_row + m) * params.outputs + output, sum, bias, output, place);
    }
  }
}

instantiate_kernel("gemv_tiles_8x16_float32", gemv_tiles, float, 1, 2, 512)
instantiate_kernel("gemv_tiles_8x16_float16", gemv_tiles, half, 1, 2, 640)
instantiate_kernel("gemv_tiles_8x16_bfloat16", gemv_tiles, bfloat, 1, 2, 640)
instantiate_types("gemv_tiles_8x32", gemv_tiles, 1, 4, 512)
instantiate_types("gemv_tiles_16x16", gemv_tiles, 2, 2, 512)
instantiate_kernel("gemv_tiles_16x32_float16", gemv_tiles, half, 2, 4, 512)
instantiate_kernel("gemv_tiles_16x32_bfloat16", gemv_tiles, bfloat, 2, 4, 512)
