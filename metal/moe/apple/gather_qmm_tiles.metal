// moe/gather_qmm.metal for many rows, on Apple GPUs without matrix units: a threadgroup has a tile of rows of the same
// expert (moe/apple/gather_tiles.h) and kTileOutputs outputs, a quarter for each of its simdgroups. Threadgroups that
// follow one another in the grid have the same outputs and up to kTileBand tiles, some of the same expert.
#include <metal_stdlib>

#include "matmul/quantized_rows.h"
#include "mittens/instantiate.h"
#include "moe/apple/gather_tiles.h"

using namespace metal;
using namespace mittens;

template <typename T, QuantizedFormat F, int MB, int fewest = 1>
[[kernel, max_total_threads_per_threadgroup(32 * kTileSimdgroups)]] void gather_qmm_tiles(
    const device T* x [[buffer(0)]],              // [inputs, rows, columns]
    quantized_matrix(w, 1, 2, 3, ScaleOf<T, F>),  // [matrices, outputs, columns]
    const device T* bias [[buffer(4)]],           // [matrices, outputs]
    const device uint2* rows [[buffer(5)]],       // as of expert_tiles
    const device uint4* tiles [[buffer(6)]],
    device T* y [[buffer(7)]],  // [pairs, rows, outputs]
    constant GatherQmmParams& params [[buffer(8)]], thread_of_tiles) {
  constexpr int NB = kTileOutputs / kTileSimdgroups / 8;
  using Rows = QuantizedRows<T, F, 8>;
  using Operand = TileOperand<T, typename Rows::Source>;
  threadgroup typename Operand::type staged[8 * MB * Operand::row];
  const ExpertTile tile = ExpertTile::of(tiles, rows, group.z * kTileBand + group.x);
  if (tile.count == 0) {
    return;
  }
  const uint expert = min(tile.expert, params.pairs.matrices - 1);
  const typename Rows::Source matrix[1] = {Rows::of(w, w_scales, w_biases, params.weights, expert)};
  const device T* const biases[1] = {bias};
  multiply_expert_tile<fewest, MB, NB>(
      x, matrix, biases, y, tile, group.y * kTileOutputs, params, staged, thread_at, lane);
}

// Runs of 2, 3, 5 and 6 bits are 16 columns long: 64 rows leave no registers for them.
instantiate_types("gather_qmm_tiles_2bit_32", gather_qmm_tiles, affine_2, 4)
instantiate_types("gather_qmm_tiles_3bit_32", gather_qmm_tiles, affine_3, 4)
instantiate_types("gather_qmm_tiles_5bit_32", gather_qmm_tiles, affine_5, 4)
instantiate_types("gather_qmm_tiles_6bit_32", gather_qmm_tiles, affine_6, 4)
instantiate_short_runs("gather_qmm_tiles", "_64", gather_qmm_tiles, 8)
