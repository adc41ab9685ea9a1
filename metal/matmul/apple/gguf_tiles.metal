// Products of many rows of x with GGUF blocks as a .gguf file stores them (mittens/source/gguf.h), on Apple GPUs without
// matrix units:
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n]
//
// A tile of matmul/apple/qmm_tiles.metal.
#include <metal_stdlib>

#include "matmul/apple/qmm_tiles.h"
#include "mittens/instantiate.h"
#include "mittens/source/gguf.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

template <typename T, BlockKind kind, int MB>
[[kernel, max_total_threads_per_threadgroup(32 * kTileSimdgroups)]] void gguf_tiles(
    const device T* x [[buffer(0)]],           // [rows, columns]
    const device uchar* blocks [[buffer(1)]],  // [outputs, row_bytes]
    const device T* bias [[buffer(2)]],        // [outputs]
    device T* y [[buffer(3)]],                 // [rows, outputs]
    constant BlocksParams& params [[buffer(4)]], thread_of_tiles) {
  constexpr int NB = kTileOutputs / kTileSimdgroups / 8;
  using Source = BlockRows<kind, 8, true>;
  using Operand = TileOperand<T, Source>;
  threadgroup typename Operand::type staged[8 * MB * Operand::row];
  const uint first_row = (group.z * kTileBand + group.x) * (8 * MB);
  if (first_row >= params.rows) {
    return;
  }
  const Source matrix[1] = {{blocks, params.row_bytes, 0}};
  multiply_by_tiles<1, MB, NB>(
      RowsOfX<T>{x + size_t(first_row) * params.columns, params.columns, params.rows - first_row}, matrix, bias,
      y + size_t(first_row) * params.outputs, group.y * kTileOutputs, params, staged, thread_at, lane,
      TileColumns<false>{params.columns});
}

instantiate_kinds("block_matmul_tiles", "_32", gguf_tiles, 4)
instantiate_common_kinds("block_matmul_tiles", "_64", gguf_tiles, 8)
