// moe/gather_swiglu.metal for many rows, on Apple GPUs without matrix units: as moe/apple/gather_qmm_tiles.metal, with half
// as many outputs, of both matrices.
#include <metal_stdlib>

#include "matmul/quantized_rows.h"
#include "mittens/instantiate.h"
#include "moe/apple/gather_tiles.h"

using namespace metal;
using namespace mittens;

template <typename T, QuantizedFormat F, int MB, int fewest = 1>
[[kernel, max_total_threads_per_threadgroup(32 * kTileSimdgroups)]] void gather_swiglu_tiles(
    const device T* x [[buffer(0)]],                 // [inputs, rows, columns]
    quantized_matrix(gate, 1, 2, 3, ScaleOf<T, F>),  // [matrices, outputs, columns]
    quantized_matrix(up, 4, 5, 6, ScaleOf<T, F>),    // as gate
    const device T* gate_bias [[buffer(7)]],         // [matrices, outputs]
    const device T* up_bias [[buffer(8)]],           // [matrices, outputs]
    const device uint2* rows [[buffer(9)]],          // as of expert_tiles
    const device uint4* tiles [[buffer(10)]],
    device T* y [[buffer(11)]],  // [pairs, rows, outputs]
    constant GatherQmmParams& params [[buffer(12)]], thread_of_tiles) {
  constexpr int NB = kTileOutputs / kTileSimdgroups / 8 / 2;
  using Rows = QuantizedRows<T, F, 8>;
  using Operand = TileOperand<T, typename Rows::Source>;
  threadgroup typename Operand::type staged[8 * MB * Operand::row];
  const ExpertTile tile = ExpertTile::of(tiles, rows, group.z * kTileBand + group.x);
  if (tile.count == 0) {
    return;
  }
  const uint expert = min(tile.expert, params.pairs.matrices - 1);
  const typename Rows::Source both[2] = {
      Rows::of(gate, gate_scales, gate_biases, params.weights, expert),
      Rows::of(up, up_scales, up_biases, params.weights, expert)};
  const device T* const biases[2] = {gate_bias, up_bias};
  multiply_expert_tile<fewest, MB, NB>(
      x, both, biases, y, tile, group.y * (kTileOutputs / 2), params, staged, thread_at, lane);
}

// Runs of 2, 3, 5 and 6 bits are 16 columns long: 64 rows leave no registers for them.
instantiate_types("gather_swiglu_tiles_2bit_32", gather_swiglu_tiles, affine_2, 4)
instantiate_types("gather_swiglu_tiles_3bit_32", gather_swiglu_tiles, affine_3, 4)
instantiate_types("gather_swiglu_tiles_5bit_32", gather_swiglu_tiles, affine_5, 4)
instantiate_types("gather_swiglu_tiles_6bit_32", gather_swiglu_tiles, affine_6, 4)
instantiate_short_runs("gather_swiglu_tiles", "_64", gather_swiglu_tiles, 8)
