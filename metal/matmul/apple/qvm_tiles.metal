// Products of many rows of x with quantized weights that are packed along the outputs, on Apple GPUs without matrix
// units:
//
//   y[m, n] = sum_k x[m, k] * w[k, n] + b[n],   w[k, n] = scales[k, n / group] * q[k, n] + biases[k, n / group]
//
// in modes but affine without biases. matmul/apple/qvm_tiles.h says how. A threadgroup has 32 or 64 rows of x, and 128
// or 64 outputs; they follow one another in the grid as in matmul/apple/qmm_tiles.metal.
#include <metal_stdlib>

#include "matmul/apple/qvm_tiles.h"
#include "matmul/quantized_rows.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, QuantizedFormat F, int rows>
[[kernel, max_total_threads_per_threadgroup(32 * kTileSimdgroups)]] void qvm_tiles(
    const device T* x [[buffer(0)]],              // [batch, rows, columns]
    quantized_matrix(w, 1, 2, 3, ScaleOf<T, F>),  // [batch, columns, outputs]
    const device T* bias [[buffer(4)]],           // [outputs]
    device T* y [[buffer(5)]],                    // [batch, rows, outputs]
    constant QuantizedParams& params [[buffer(6)]], thread_of_tiles) {
  using Rows = QuantizedRows<T, F, 8>;
  using Shape = TransposedTile<T, typename Rows::Source, rows>;
  threadgroup typename Shape::U staged[rows * Shape::row];
  const uint first_row = (group.z / params.matrices * kTileBand + group.x) * rows;
  if (first_row >= params.rows) {
    return;
  }
  const uint index = group.z % params.matrices;
  const size_t before = size_t(index) * params.rows + first_row;
  multiply_by_transposed_tiles<rows>(
      RowsOfX<T>{x + before * params.columns, params.columns, params.rows - first_row},
      Rows::of(w, w_scales, w_biases, params, index), bias, y + before * params.outputs, group.y * Shape::outputs,
      params, staged, thread_at, lane, TileColumns<false>{params.columns});
}

instantiate_formats("quantized_matmul_qvm_tiles", "_32", qvm_tiles, 32)
instantiate_short_runs("quantized_matmul_qvm_tiles", "_64", qvm_tiles, 64)
