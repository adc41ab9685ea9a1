// Products of many rows with chosen experts, a tile of rows that have the same one at a time
// (moe/apple/expert_tiles.metal): as in matmul/apple/qmm_tiles.h, but blocks of 8 rows past the tile's end are left
// out.
#pragma once

#include "matmul/apple/qmm_tiles.h"
#include "moe/pairs.h"

namespace mittens {

// Numbers, not pointers: they take fewer registers over a product.
struct ExpertTile {
  const device uint2* rows;  // of all tiles, each of x and of y
  uint expert;
  uint first;  // of rows
  uint count;

  static ExpertTile of(const device uint4* tiles, const device uint2* rows, uint index) {
    const uint4 tile = tiles[index];
    return {rows, tile.x, tile.y, tile.z};
  }

  // Of x and of y.
  uint2 row(uint i) const {
    return rows[first + i];
  }
};

inline float gated(float gate, float up, constant GatherQmmParams& params) {
  // Comparisons, which leave a NaN as it is.
  gate = gate > params.limit ? params.limit : gate;
  up = up > params.limit ? params.limit : up;
  up = up < -params.limit ? -params.limit : up;
  return activate(gate, params.weights.gate_alpha, params.weights.gate_beta) * (up + params.offset);
}

// The result from the sums of N matrices: sum + bias of one, the gated product of two. bias: of all experts.
template <typename T, int N>
inline float expert_epilogue(
    thread const float (&sums)[N], thread const device T* const (&bias)[N], uint expert,
    constant GatherQmmParams& params, uint output) {
  float with_bias[N];
#pragma unroll
  for (int s = 0; s < N; ++s) {
    with_bias[s] =
        params.weights.has_bias ? sums[s] + float(bias[s][size_t(expert) * params.weights.outputs + output]) : sums[s];
  }
  if constexpr (N == 2) {
    return gated(with_bias[0], with_bias[1], params);
  } else {
    return with_bias[0];
  }
}

// Where the products of a tile with the outputs of a simdgroup go.
template <typename T, int N>
struct ExpertOutputs {
  device T* y;
  const device T* bias[N];  // [experts, outputs]
  uint own;                 // the first output, before which there are another's
  uint output;              // the lane's first
};

// The smallest number of blocks of 8 rows that has a loop of its own, from `blocks` on.
constexpr int next_blocks(int blocks) {
  return blocks == 7 ? 8 : blocks;
}

// Multiplies and writes the rows of a tile, by B blocks of them or more. Each number of blocks has a loop of its own:
// sums that a loop may leave out would be moved between registers.
template <int B, int MB, int NB, typename T, int N, typename Source>
inline void multiply_blocks(
    const device T* x, thread const Source (&w)[N], ExpertTile tile, ExpertOutputs<T, N> to,
    constant GatherQmmParams& params, threadgroup typename TileOperand<T, Source>::type* staged, uint thread_at,
    uint lane) {
  if (B < MB && tile.count > 8 * B) {
    if constexpr (B < MB) {
      multiply_blocks<next_blocks(B + 1), MB, NB>(x, w, tile, to, params, staged, thread_at, lane);
    }
    return;
  }
  using Staged = Staging<T, Source, B>;
  Staged staging = Staged::of(x, staged, thread_at);
#pragma unroll
  for (int i = 0; i < Staged::rows; ++i) {
    const uint row = tile.row(min(Staged::row_of(thread_at, i), tile.count - 1)).x;
    staging.from[i] = (row * params.weights.columns + staging.column) / 4;
  }
  Tile<float, B, N * NB> sums;
  multiply_staged<N, B, NB>(staging, TileColumns<false>{params.weights.columns}, w, to.output, staged, lane, sums);
#pragma unroll
  for (int i = 0; i < B; ++i) {
    const uint m = i * 8 + tile_row(lane);
    if (m < tile.count) {
      device T* row = to.y + size_t(tile.row(m).y) * params.weights.outputs;
#pragma unroll
      for (int j = 0; j < NB; ++j) {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const uint n = to.output + j * 8 + k;
          if (n >= to.own) {
            float of_row[N];
#pragma unroll
            for (int s = 0; s < N; ++s) {
              of_row[s] = sums.at[i][s * NB + j][k];
            }
            row[n] = T(expert_epilogue(of_row, to.bias, tile.expert, params, n));
          }
        }
      }
    }
  }
}

// Writes the products of a tile's rows, 8 MB at most, with the outputs of a threadgroup: 8 NB or more for each
// simdgroup. w: of the expert. fewest: blocks of 8 rows that the smallest tile has.
template <int fewest, int MB, int NB, typename T, int N, typename Source>
inline void multiply_expert_tile(
    const device T* x, thread const Source (&w)[N], thread const device T* const (&bias)[N], device T* y,
    ExpertTile tile, uint first_output, constant GatherQmmParams& params,
    threadgroup typename TileOperand<T, Source>::type* staged, uint thread_at, uint lane) {
  ExpertOutputs<T, N> to;
  to.y = y;
#pragma unroll
  for (int s = 0; s < N; ++s) {
    to.bias[s] = bias[s];
  }
  to.own = first_output + thread_at / 32 * (8 * NB);
  to.output = min(to.own, params.weights.outputs - 8 * NB) + tile_column(lane);
  if (tile.expert < params.pairs.matrices) {
    multiply_blocks<fewest, MB, NB>(x, w, tile, to, params, staged, thread_at, lane);
    return;
  }
  for (uint i = thread_at / 32; i < tile.count; i += kTileSimdgroups) {
    device T* row = y + size_t(tile.row(i).y) * params.weights.outputs;
    for (uint n = first_output + lane; n < min(first_output + 8 * NB * kTileSimdgroups, params.weights.outputs);
         n += 32) {
      row[n] = T(not_a_number());
    }
  }
}

}  // namespace mittens
