// Products of many rows of x with dense weights, on Apple GPUs without matrix units:
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n]        w [outputs, columns]
//   y[m, n] = sum_k x[m, k] * w[k, n] + b[n]        w [columns, outputs], the kernel matmul_columns_tiles
//
// Tiles of matmul/apple/qmm_tiles.metal and matmul/apple/qvm_tiles.metal, with 64 outputs. 64 rows of x are for GPUs whose
// products of bfloat are slow (M1, M2): both operands are widened once, so that products are of floats. 32 rows are for
// as few of any type. Rows of w are whole 16 bytes.
#include <metal_stdlib>

#include "matmul/apple/qvm_tiles.h"
#include "mittens/instantiate.h"
#include "mittens/source/dense.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

template <typename T, int MB>
[[kernel, max_total_threads_per_threadgroup(32 * kTileSimdgroups)]] void matmul_tiles(
    const device T* x [[buffer(0)]],     // [rows, columns]
    const device T* w [[buffer(1)]],     // [outputs, columns]
    const device T* bias [[buffer(2)]],  // [outputs]
    device T* y [[buffer(3)]],           // [rows, outputs]
    constant GemvParams& params [[buffer(4)]], thread_of_tiles) {
  constexpr int NB = kTileOutputs / kTileSimdgroups / 8;
  using Operand = TileOperand<T, Dense<T>>;
  threadgroup typename Operand::type staged[8 * MB * Operand::row];
  const uint first_row = (group.z * kTileBand + group.x) * (8 * MB);
  if (first_row >= params.rows) {
    return;
  }
  const Dense<T> matrix[1] = {Dense<T>::of(w, params.weight_stride)};
  multiply_by_tiles<1, MB, NB>(
      RowsOfX<T>{x + size_t(first_row) * params.columns, params.columns, params.rows - first_row}, matrix, bias,
      y + size_t(first_row) * params.outputs, group.y * kTileOutputs, params, staged, thread_at, lane,
      TileColumns<false>{params.columns});
}

template <int rows>
[[kernel, max_total_threads_per_threadgroup(32 * kTileSimdgroups)]] void matmul_columns_tiles(
    const device bfloat* x [[buffer(0)]],     // [rows, columns]
    const device bfloat* w [[buffer(1)]],     // [columns, outputs]
    const device bfloat* bias [[buffer(2)]],  // [outputs]
    device bfloat* y [[buffer(3)]],           // [rows, outputs]
    constant GemvParams& params [[buffer(4)]], thread_of_tiles) {
  using Shape = TransposedTile<bfloat, Dense<bfloat>, rows>;
  threadgroup float staged[rows * Shape::row];
  const uint first_row = (group.z * kTileBand + group.x) * rows;
  if (first_row >= params.rows) {
    return;
  }
  multiply_by_transposed_tiles<rows>(
      RowsOfX<bfloat>{x + size_t(first_row) * params.columns, params.columns, params.rows - first_row},
      Dense<bfloat>::of(w, params.weight_stride), bias, y + size_t(first_row) * params.outputs,
      group.y * Shape::outputs, params, staged, thread_at, lane, TileColumns<false>{params.columns});
}

instantiate_types("matmul_tiles_32", matmul_tiles, 4)
instantiate_kernel("matmul_tiles_64_bfloat16", matmul_tiles, bfloat, 8)
instantiate_kernel("matmul_columns_tiles_32_bfloat16", matmul_columns_tiles, 32)
instantiate_kernel("matmul_columns_tiles_64_bfloat16", matmul_columns_tiles, 64)
