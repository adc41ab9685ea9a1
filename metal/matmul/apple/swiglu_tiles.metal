// The gated half of a feed-forward block for many rows of x, from quantized weights in one launch, on Apple GPUs without
// matrix units:
//
//   y[m, n] = activate(sum_k x[m, k] * gate[n, k]) * sum_k x[m, k] * up[n, k],   as matmul/activation.h
//
// A tile of matmul/apple/qmm_tiles.metal with half as many outputs, of both matrices. Sums, activation and product are in
// float32, rounded once.
#include <metal_stdlib>

#include "matmul/apple/qmm_tiles.h"
#include "matmul/quantized_rows.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, QuantizedFormat F, int MB>
[[kernel, max_total_threads_per_threadgroup(32 * kTileSimdgroups)]] void swiglu_tiles(
    const device T* x [[buffer(0)]],                 // [rows, columns]
    quantized_matrix(gate, 1, 2, 3, ScaleOf<T, F>),  // [outputs, columns]
    quantized_matrix(up, 4, 5, 6, ScaleOf<T, F>),    // as gate
    device T* y [[buffer(7)]],                       // [rows, outputs]
    constant QuantizedParams& params [[buffer(8)]], thread_of_tiles) {
  constexpr int NB = kTileOutputs / kTileSimdgroups / 8 / 2;
  using Rows = QuantizedRows<T, F, 8>;
  using Operand = TileOperand<T, typename Rows::Source>;
  threadgroup typename Operand::type staged[8 * MB * Operand::row];
  const uint first_row = (group.z * kTileBand + group.x) * (8 * MB);
  if (first_row >= params.rows) {
    return;
  }
  const typename Rows::Source matrices[2] = {
      Rows::of(gate, gate_scales, gate_biases, params, 0), Rows::of(up, up_scales, up_biases, params, 0)};
  const device T* no_bias = nullptr;
  multiply_by_tiles<2, MB, NB>(
      RowsOfX<T>{x + size_t(first_row) * params.columns, params.columns, params.rows - first_row}, matrices, no_bias,
      y + size_t(first_row) * params.outputs, group.y * (kTileOutputs / 2), params, staged, thread_at, lane,
      TileColumns<false>{params.columns});
}

instantiate_formats("quantized_swiglu_qmm_tiles", "_32", swiglu_tiles, 4)
instantiate_short_runs("quantized_swiglu_qmm_tiles", "_64", swiglu_tiles, 8)
