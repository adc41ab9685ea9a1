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
    constant BlocksParams& params [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint thread_at [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
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
      y + size_t(first_row) * params.outputs, group.y * kTileOutputs, params, staged, thread_at, lane);
}

instantiate_types("block_matmul_tiles_q4_0_32", gguf_tiles, q4_0, 4)
instantiate_types("block_matmul_tiles_q4_1_32", gguf_tiles, q4_1, 4)
instantiate_types("block_matmul_tiles_q5_0_32", gguf_tiles, q5_0, 4)
instantiate_types("block_matmul_tiles_q5_1_32", gguf_tiles, q5_1, 4)
instantiate_types("block_matmul_tiles_q8_0_32", gguf_tiles, q8_0, 4)
instantiate_types("block_matmul_tiles_q2_k_32", gguf_tiles, q2_k, 4)
instantiate_types("block_matmul_tiles_q3_k_32", gguf_tiles, q3_k, 4)
instantiate_types("block_matmul_tiles_q4_k_32", gguf_tiles, q4_k, 4)
instantiate_types("block_matmul_tiles_q5_k_32", gguf_tiles, q5_k, 4)
instantiate_types("block_matmul_tiles_q6_k_32", gguf_tiles, q6_k, 4)
instantiate_types("block_matmul_tiles_iq4_nl_32", gguf_tiles, iq4_nl, 4)
instantiate_types("block_matmul_tiles_iq4_xs_32", gguf_tiles, iq4_xs, 4)
instantiate_types("block_matmul_tiles_mxfp4_32", gguf_tiles, block_mxfp4, 4)
instantiate_types("block_matmul_tiles_nvfp4_32", gguf_tiles, block_nvfp4, 4)

// Common kinds.
instantiate_types("block_matmul_tiles_q4_0_64", gguf_tiles, q4_0, 8)
instantiate_types("block_matmul_tiles_q8_0_64", gguf_tiles, q8_0, 8)
instantiate_types("block_matmul_tiles_q4_k_64", gguf_tiles, q4_k, 8)
instantiate_types("block_matmul_tiles_q5_k_64", gguf_tiles, q5_k, 8)
instantiate_types("block_matmul_tiles_q6_k_64", gguf_tiles, q6_k, 8)
