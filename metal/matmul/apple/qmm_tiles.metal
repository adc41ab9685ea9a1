// Products of many rows of x with quantized weights, on Apple GPUs without matrix units:
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n],   w[n, k] = scales[n, k / group] * q[n, k] + biases[n, k / group]
//
// in modes but affine without biases. A threadgroup has 8 MB rows of x and kTileOutputs outputs, a quarter for each of its
// simdgroups; matmul/apple/qmm_tiles.h says how. There are as many outputs as a simdgroup has, or more. Threadgroups that
// follow one another in the grid have the same outputs and up to kTileBand blocks of rows, so that both x and weights are
// read again while caches have them. Where tiles of 32 rows are few, several threadgroups share the columns of one: each
// leaves its sums in float32, [splits, batch, rows, outputs], for splitk_reduce.metal.
#include <metal_stdlib>

#include "matmul/apple/qmm_tiles.h"
#include "matmul/quantized_rows.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, QuantizedFormat F, int MB>
[[kernel, max_total_threads_per_threadgroup(32 * kTileSimdgroups)]] void qmm_tiles(
    const device T* x [[buffer(0)]],              // [batch, rows, columns]
    quantized_matrix(w, 1, 2, 3, ScaleOf<T, F>),  // [batch, outputs, columns]
    const device T* bias [[buffer(4)]],           // [outputs]
    device T* y [[buffer(5)]],                    // [batch, rows, outputs]
    constant QuantizedParams& params [[buffer(6)]], thread_of_tiles) {
  constexpr int NB = kTileOutputs / kTileSimdgroups / 8;
  using Rows = QuantizedRows<T, F, 8>;
  using Operand = TileOperand<T, typename Rows::Source>;
  threadgroup typename Operand::type staged[8 * MB * Operand::row];
  const uint part = group.z / params.matrices;       // of the rows, or of the columns
  const bool splits = MB == 4 && params.splits > 1;  // more registers for 64 rows would be fewer threads
  const uint first_row = ((splits ? 0 : part * kTileBand) + group.x) * (8 * MB);
  if (first_row >= params.rows) {
    return;
  }
  const uint index = group.z % params.matrices;
  const size_t before = size_t(index) * params.rows + first_row;
  const typename Rows::Source matrix[1] = {Rows::of(w, w_scales, w_biases, params, index)};
  TileColumns<MB == 4> columns = {params.columns, 0, splits};
  size_t to = before;
  if (splits) {
    columns.first = part * params.columns_per_split;
    columns.end = min(columns.first + params.columns_per_split, params.columns);
    to += size_t(part) * params.matrices * params.rows;
  }
  to *= params.outputs;
  multiply_by_tiles<1, MB, NB>(
      RowsOfX<T>{x + before * params.columns, params.columns, params.rows - first_row}, matrix, bias,
      splits ? (device T*)((device float*)y + to) : y + to, group.y * kTileOutputs, params, staged, thread_at, lane,
      columns);
}

instantiate_formats("quantized_matmul_qmm_tiles", "_32", qmm_tiles, 4)
// Runs of 2, 3, 5 and 6 bits are 16 columns long: 64 rows leave no registers for them.
instantiate_short_runs("quantized_matmul_qmm_tiles", "_64", qmm_tiles, 8)
