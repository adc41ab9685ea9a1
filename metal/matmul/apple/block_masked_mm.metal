// Products with masked blocks, on Apple GPUs without matrix units:
//
//   y[m, n] = my[m, n] sum_k (x[m, k] mx[m, k]) (w[n, k] mw[n, k])        w [outputs, columns]
//   y[m, n] = my[m, n] sum_k (x[m, k] mx[m, k]) (w[k, n] mw[k, n])        w [columns, outputs]: columns kernels
//
// where masks have one value for each block of 32 x 32 or 64 x 64. Tiles are as in matmul/apple/matmul_tiles.metal, but
// each lies in one block of y: of blocks of 32 most have two simdgroups. So all of a tile leaves out the same columns.
// _scaled: masks of operands are numbers of the product's type. Rows of x and w are whole 16 bytes.
#include <metal_stdlib>

#include "matmul/apple/block_masks.h"
#include "matmul/apple/qvm_tiles.h"
#include "mittens/instantiate.h"
#include "mittens/source/dense.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

constant constexpr int kSimdgroupOutputs = 16;

template <typename T, int MB, int outputs, bool scaled>
[[kernel, max_total_threads_per_threadgroup(2 * outputs)]] void block_masked_tiles(
    const device T* x [[buffer(0)]],              // [matrices, rows, columns]
    const device T* w [[buffer(1)]],              // [matrices, outputs, columns]
    const device uchar* mask_of_x [[buffer(2)]],  // [matrices, blocks of rows, blocks of columns]
    const device uchar* mask_of_w [[buffer(3)]],  // [matrices, blocks of outputs, blocks of columns]
    const device uchar* mask_of_y [[buffer(4)]],  // [matrices, blocks of rows, blocks of outputs]
    device T* y [[buffer(5)]],                    // [matrices, rows, outputs]
    constant BlockMaskedParams& params [[buffer(6)]], thread_of_tiles) {
  using Source = Dense<T, (outputs == 32 ? 4 : 16 / int(sizeof(T)))>;
  using Operand = TileOperand<T, Source>;
  threadgroup typename Operand::type staged[8 * MB * Operand::row];
  const MaskedPlace at = MaskedPlace::of(group, 8 * MB, params);
  if (at.first_row >= params.rows) {
    return;
  }
  const uint first_output = group.y * outputs;
  const Source matrix[1] = {Source::of(w + at.of_w, params.weight_stride)};
  multiply_by_tiles<1, MB, kSimdgroupOutputs / 8, outputs / kSimdgroupOutputs>(
      RowsOfX<T>{x + at.of_x, params.columns, params.rows - at.first_row}, matrix, x, y + at.of_y, first_output, params,
      staged, thread_at, lane,
      MaskedColumns<T, scaled>::of(mask_of_x, mask_of_w, mask_of_y, at.matrix, at.first_row, first_output, params));
}

template <typename T, int rows, int E, int simdgroups, bool scaled>
[[kernel, max_total_threads_per_threadgroup(32 * simdgroups)]] void block_masked_columns_tiles(
    const device T* x [[buffer(0)]],              // [matrices, rows, columns]
    const device T* w [[buffer(1)]],              // [matrices, columns, outputs]
    const device uchar* mask_of_x [[buffer(2)]],  // [matrices, blocks of rows, blocks of columns]
    const device uchar* mask_of_w [[buffer(3)]],  // [matrices, blocks of outputs, blocks of columns]
    const device uchar* mask_of_y [[buffer(4)]],  // [matrices, blocks of rows, blocks of outputs]
    device T* y [[buffer(5)]],                    // [matrices, rows, outputs]
    constant BlockMaskedParams& params [[buffer(6)]], thread_of_tiles) {
  using Source = Dense<T, E>;
  using Shape = TransposedTile<T, Source, rows, simdgroups>;
  threadgroup typename Shape::U staged[rows * Shape::row];
  const MaskedPlace at = MaskedPlace::of(group, rows, params);
  if (at.first_row >= params.rows) {
    return;
  }
  const uint first_output = group.y * Shape::outputs;
  multiply_by_transposed_tiles<rows, simdgroups>(
      RowsOfX<T>{x + at.of_x, params.columns, params.rows - at.first_row},
      Source::of(w + at.of_w, params.weight_stride), x, y + at.of_y, first_output, params, staged, thread_at, lane,
      MaskedColumns<T, scaled>::of(mask_of_x, mask_of_w, mask_of_y, at.matrix, at.first_row, first_output, params));
}

#define instantiate_masked(more, scaled)                                                                         \
  instantiate_types("block_masked_mm_tiles_32x32" more, block_masked_tiles, 4, 32, scaled)                       \
  instantiate_types("block_masked_mm_tiles_32x64" more, block_masked_tiles, 4, 64, scaled)                       \
  instantiate_types("block_masked_mm_columns_tiles_64x64" more, block_masked_columns_tiles, 64, 8, 4, scaled)

instantiate_masked("", false)
instantiate_masked("_scaled", true)
// A simdgroup's part of 32 rows by 32 outputs is 16 x 16 of runs of 4 outputs, or 16 x 32.
instantiate_kernel("block_masked_mm_columns_tiles_32x32_float32", block_masked_columns_tiles, float, 32, 4, 4, false)
instantiate_kernel("block_masked_mm_columns_tiles_32x32_float16", block_masked_columns_tiles, half, 32, 8, 2, false)
instantiate_kernel("block_masked_mm_columns_tiles_32x32_bfloat16", block_masked_columns_tiles, bfloat, 32, 8, 2, false)
instantiate_kernel(
    "block_masked_mm_columns_tiles_32x32_scaled_float32", block_masked_columns_tiles, float, 32, 4, 4, true)
instantiate_kernel(
    "block_masked_mm_columns_tiles_32x32_scaled_float16", block_masked_columns_tiles, half, 32, 8, 2, true)
instantiate_kernel(
    "block_masked_mm_columns_tiles_32x32_scaled_bfloat16", block_masked_columns_tiles, bfloat, 32, 8, 2, true)
instantiate_types("block_masked_mm_tiles_64x64", block_masked_tiles, 8, 64, false)
// In bfloat16 these spill.
instantiate_kernel("block_masked_mm_tiles_64x64_scaled_float32", block_masked_tiles, float, 8, 64, true)
instantiate_kernel("block_masked_mm_tiles_64x64_scaled_float16", block_masked_tiles, half, 8, 64, true)
