// moe/gather_mm.metal for many rows, on Apple GPUs without matrix units: as moe/apple/gather_qmm_tiles.metal, with dense
// matrices, whose rows are whole 16 bytes.
#include <metal_stdlib>

#include "matmul/batch.h"
#include "mittens/instantiate.h"
#include "mittens/source/dense.h"
#include "moe/apple/gather_tiles.h"

using namespace metal;
using namespace mittens;

template <typename T, int MB, int fewest = 1>
[[kernel, max_total_threads_per_threadgroup(32 * kTileSimdgroups)]] void gather_mm_tiles(
    const device T* x [[buffer(0)]],         // [inputs, rows, columns]
    const device T* w [[buffer(1)]],         // [matrices, outputs, columns]
    const device uint2* rows [[buffer(2)]],  // as of expert_tiles
    const device uint4* tiles [[buffer(3)]],
    device T* y [[buffer(4)]],  // [pairs, rows, outputs]
    constant GatherQmmParams& params [[buffer(5)]], thread_of_tiles) {
  constexpr int NB = kTileOutputs / kTileSimdgroups / 8;
  using Source = Dense<T>;
  using Operand = TileOperand<T, Source>;
  threadgroup typename Operand::type staged[8 * MB * Operand::row];
  const ExpertTile tile = ExpertTile::of(tiles, rows, group.z * kTileBand + group.x);
  if (tile.count == 0) {
    return;
  }
  const uint expert = min(tile.expert, params.pairs.matrices - 1);
  const Source matrix[1] = {Source::of(
      w + matrix_offset(params.weights.batch, params.weights.weight_strides, expert), params.weights.weight_stride)};
  const device T* const no_biases[1] = {x};
  multiply_expert_tile<fewest, MB, NB>(
      x, matrix, no_biases, y, tile, group.y * kTileOutputs, params, staged, thread_at, lane);
}

instantiate_types("gather_mm_tiles_64", gather_mm_tiles, 8)
