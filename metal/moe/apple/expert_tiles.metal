// Tiles of rows that have the same expert, for products of many rows with chosen experts on Apple GPUs without matrix
// units (moe/apple/gather_tiles.h), from indices in any order.
//
// One threadgroup counts the rows of each expert, and rows of pairs out of range as if of one more. The rows of an
// expert follow one another in `rows`, in no certain order, which changes none of the results; a tile has
// params.tile_rows of them, an expert's last the rest. Tiles past the last expert have no rows.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "moe/pairs.h"

using namespace metal;
using namespace mittens;

template <uint Experts>
[[kernel, max_total_threads_per_threadgroup(Experts)]] void expert_tiles(
    const device uint* matrices [[buffer(0)]],  // [pairs]
    const device uint* inputs [[buffer(1)]],    // [pairs]
    device uint2* rows [[buffer(2)]],           // of x and of y; [pairs times rows of an input]
    device uint4* tiles [[buffer(3)]],          // expert, its first of `rows`, how many, 0; [params.tiles]
    constant ExpertTilesParams& params [[buffer(4)]], uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup atomic_uint counts[Experts];
  threadgroup uint2 totals[Experts / 32];
  atomic_store_explicit(&counts[t], 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint row = t; row < params.rows; row += Experts) {
    const Pair pair = pair_of(matrices, inputs, params.pairs, row / params.pair_rows);
    atomic_fetch_add_explicit(&counts[pair.is_valid ? pair.matrix : params.pairs.matrices], 1u, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  // Each thread has an expert: the rows and tiles before it.
  const uint count = atomic_load_explicit(&counts[t], memory_order_relaxed);
  const uint2 own = uint2(count, (count + params.tile_rows - 1) / params.tile_rows);
  uint2 before = uint2(simd_prefix_exclusive_sum(own.x), simd_prefix_exclusive_sum(own.y));
  if (lane == 31) {
    totals[simdgroup] = before + own;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint2 of_lane = totals[lane];
  before += uint2(simd_sum(lane < simdgroup ? of_lane.x : 0), simd_sum(lane < simdgroup ? of_lane.y : 0));
  const uint all = simd_sum(of_lane.y);
  for (uint i = 0; i < own.y; ++i) {
    const uint first = i * params.tile_rows;
    tiles[before.y + i] = uint4(t, before.x + first, min(count - first, params.tile_rows), 0);
  }
  for (uint i = all + t; i < params.tiles; i += Experts) {
    tiles[i] = uint4(0);
  }
  atomic_store_explicit(&counts[t], before.x, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);

  for (uint row = t; row < params.rows; row += Experts) {
    const Pair pair = pair_of(matrices, inputs, params.pairs, row / params.pair_rows);
    const uint bucket = pair.is_valid ? pair.matrix : params.pairs.matrices;
    const uint at = atomic_fetch_add_explicit(&counts[bucket], 1u, memory_order_relaxed);
    rows[at] = uint2(pair.input * params.pair_rows + row % params.pair_rows, row);
  }
}

instantiate_kernel("expert_tiles", expert_tiles, kTiledExperts)
