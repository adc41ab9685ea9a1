// Products of several rows of x with a dense matrix in a half type, by 8x8 matrices, sums in float32 (fewest_tile_rows in
// csrc/ops/gemv.cpp says from how many rows on):
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n]
//
// A matrix of weights is 8 outputs by 8 columns, one of x 8 columns by 8 rows. The simdgroups of a threadgroup share out
// the columns of x for 16 rows of weights, so that each weight is read once; where outputs are few, several threadgroups
// do, and split_sum.metal adds up what they leave.
//
// A load takes four rows of weights, 128 bytes each, the halves of a row by the four lanes of a row of matrices each.
// Two such loads give each lane one half of two rows; neighbouring rows of lanes then swap one for the other, so that
// each has both halves of one row. Which columns meet is free as long as both operands agree: of 8 neighbours matrix t
// takes t and t + 4.
//
// All that a simdgroup takes at once is on its way before anything is multiplied. On an H200 it is this that decides, and
// how many simdgroups fit: at 96 registers a lane 14336x4096 takes 30 us, with half the loads on their way 35, with the
// next ones besides 39.
//
// Rows of both start on 16 bytes; gemv.metal takes what does not.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/split.h"
#include "mittens/tile_partials.h"
#include "mittens/vector.h"
#include "params/gemv.h"

using namespace metal;
using namespace mittens;

constant constexpr int tile = 8;
constant constexpr int half_run = 4 * tile;
constant constexpr int run = 2 * half_run;  // columns of eight matrices
constant constexpr int blocks = 2;          // of 8 outputs

// Runs at a time: 16 registers of weights each and, for MB blocks of 8 rows of x, as many of x for each of them.
template <int MB>
constexpr int runs() {
  return 2 / MB;
}

// The output, of a block of 8, that a row of a matrix stands for.
inline uint output_of(uint row) {
  return row % 2 * 4 + row / 2;
}

// What a lane loads of a run of a block's weights: a half run of two outputs, and then both of one.
struct LaneWeights {
  uint4 halves[2];
};

// A lane's right operands of a run.
template <typename T, int MB>
struct LaneRows {
  vec<T, 2> at[run / tile][MB];
};

// left: columns from the lane's first one on. whole: all of them are there.
template <bool whole, typename T, int U>
inline void load_weights(
    const device T* w, thread const uint (&rows)[blocks][2], int left, thread LaneWeights (&to)[U][blocks]) {
#pragma unroll
  for (int i = 0; i < U; ++i) {
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        to[i][n].halves[h] = uint4(0);
        if (whole || i * run < left) {
          to[i][n].halves[h] = load_pack(w + rows[n][h] + i * run, true);
        }
      }
    }
  }
}

inline void swap_halves(thread LaneWeights& weights, bool odd) {
  const uint4 other = simd_shuffle_xor(odd ? weights.halves[0] : weights.halves[1], tile_lane(1, 0));
  weights.halves[0] = odd ? other : weights.halves[0];
  weights.halves[1] = odd ? weights.halves[1] : other;
}

// Rows that are not there stand for the last one: nobody asks for what comes of them.
template <bool whole, typename T, int MB, int U>
inline void load_rows(
    const device T* x, uint rows, uint columns, int left, uint lane, thread LaneRows<T, MB> (&to)[U]) {
#pragma unroll
  for (int i = 0; i < U; ++i) {
#pragma unroll
    for (int block = 0; block < MB; ++block) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        vec<T, 4> row[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          row[j] = vec<T, 4>(T(0), T(0), T(0), T(0));
          if (whole || i * run + h * half_run < left) {
            const uint m = min(block * tile + tile_column(lane) + j, rows - 1);
            row[j] = *(const device vec<T, 4>*)(x + m * columns + i * run + h * half_run);
          }
        }
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          to[i].at[h * 4 + t][block] = vec<T, 2>(row[0][t], row[1][t]);
        }
      }
    }
  }
}

// sums += w x over U runs from column `begin` on, or what is there of them.
template <bool whole, int U, typename T, int MB>
inline void add_runs(
    const device T* x, const device T* w, thread const uint (&outputs)[blocks][2], uint begin, uint end, uint rows,
    uint columns, uint lane, thread Tile<float, blocks, MB>& sums) {
  const bool odd = tile_row(lane) % 2;
  const uint weight = begin + (odd ? half_run : 0) + tile_column(lane) * 4;
  const uint column = begin + tile_row(lane) * 4;
  LaneWeights weights[U][blocks];
  LaneRows<T, MB> activations[U];
  load_weights<whole>(w + weight, outputs, int(end) - int(weight), weights);
  load_rows<whole>(x + column, rows, columns, int(end) - int(column), lane, activations);
#pragma unroll
  for (int i = 0; i < U; ++i) {
#pragma unroll
    for (int n = 0; n < blocks; ++n) {
      swap_halves(weights[i][n], odd);
    }
  }
#pragma unroll
  for (int i = 0; i < U; ++i) {
#pragma unroll
    for (int t = 0; t < run / tile; ++t) {
#pragma unroll
      for (int n = 0; n < blocks; ++n) {
        const uint4 of = weights[i][n].halves[t / 4];
        const vec<T, 2> pair = as_type<vec<T, 2>>(side_by_side(of[t % 4 / 2], of[2 + t % 4 / 2], t % 2));
#pragma unroll
        for (int block = 0; block < MB; ++block) {
          sums.at[n][block] = multiply_tiles<T>(pair, activations[i].at[t][block], sums.at[n][block]);
        }
      }
    }
  }
}

// The limit on threads is also what compilers allot registers by: with 640 it is the 96 above.
template <typename T, int MB>
[[kernel, max_total_threads_per_threadgroup(MB > 1 ? 256 : 640)]] void gemv_tiles(
    const device T* x [[buffer(0)]],     // [rows, columns]
    const device T* w [[buffer(1)]],     // [outputs, columns]
    const device T* bias [[buffer(2)]],  // [outputs]
    device T* y [[buffer(3)]],           // [rows, outputs], or float [splits, rows, outputs]
    constant GemvParams& params [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  using Partials = TilePartials<blocks, MB>;
  constexpr uint width = runs<MB>() * run;
  threadgroup float partials[Partials::all];
  const uint first_output = group.x * Partials::outputs;
  const uint valid = min(params.outputs - first_output, uint(Partials::outputs));
  const uint first_row = group.y * Partials::rows;
  const uint rows = min(params.rows - first_row, uint(Partials::rows));
  const uint end = min(group.z * params.columns_per_split + params.columns_per_split, params.columns);
  x += size_t(first_row) * params.columns;
  w += size_t(first_output) * params.weight_stride;
  // Of the rows that a lane loads; those that are not there stand for the last one, too.
  uint outputs[blocks][2];
#pragma unroll
  for (int n = 0; n < blocks; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      outputs[n][h] = min(n * tile + h * 4 + tile_row(lane) / 2, valid - 1) * params.weight_stride;
    }
  }

  Tile<float, blocks, MB> sums;
  fill(sums, 0.0f);
  for (uint begin = group.z * params.columns_per_split + simdgroup * width; begin < end; begin += simdgroups * width) {
    if (begin + width <= end) {
      add_runs<true, runs<MB>()>(x, w, outputs, begin, end, rows, params.columns, lane, sums);
    } else {
      for (uint last = begin; last < end; last += run) {
        add_runs<false, 1>(x, w, outputs, last, end, rows, params.columns, lane, sums);
      }
    }
  }

  leave_sums(sums, partials, simdgroup, output_of(tile_row(lane)), lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const SplitPlace place{group.z, params.splits, size_t(params.rows) * params.outputs, params.has_bias != 0};
  for (uint i = t; i < Partials::rows * Partials::outputs; i += simdgroups * 32) {
    const uint m = i / Partials::outputs;
    const uint n = i % Partials::outputs;
    if (m < rows && n < valid) {
      const float sum = left_sum<Partials>(partials, n, m, simdgroups);
      const uint output = first_output + n;
      store_split(y, size_t(first_row + m) * params.outputs + output, sum, bias, output, place);
    }
  }
}

#define instantiate_tiles(MB, M)                                            \
  instantiate_kernel("gemv_tiles_" #M "_float16", gemv_tiles, half, MB)      \
  instantiate_kernel("gemv_tiles_" #M "_bfloat16", gemv_tiles, bfloat, MB)

instantiate_tiles(1, 8)
instantiate_tiles(2, 16)
