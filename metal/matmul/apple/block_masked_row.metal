// matmul/apple/block_masked_mm.metal for one row of x:
//
//   y[n] = my[n] sum_k (x[k] mx[k]) (w[n, k] mw[n, k])        w [outputs, columns]
//   y[n] = my[n] sum_k (x[k] mx[k]) (w[k, n] mw[k, n])        w [columns, outputs], the kernel of columns
//
// rows: simdgroups of a threadgroup share the columns for kRowOutputs outputs, 16 bytes a lane at a time. columns: a
// lane has 16 bytes of outputs, and rows of w are dealt to the lanes and simdgroups left over. What a lane loads at once
// lies in one block: it reads that block's masks before, and loads nothing where they are zero.
#include <metal_stdlib>

#include "matmul/apple/block_masks.h"
#include "matmul/outputs.h"
#include "matmul/rows.h"
#include "mittens/instantiate.h"
#include "mittens/pack.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

template <typename T, bool scaled>
[[kernel, max_total_threads_per_threadgroup(32 * kProductSimdgroups)]] void block_masked_row(
    const device T* x [[buffer(0)]],              // [matrices, columns]
    const device T* w [[buffer(1)]],              // [matrices, outputs, columns]
    const device uchar* mask_of_x [[buffer(2)]],  // [matrices, blocks of columns]
    const device uchar* mask_of_w [[buffer(3)]],  // [matrices, blocks of outputs, blocks of columns]
    const device uchar* mask_of_y [[buffer(4)]],  // [matrices, blocks of outputs]
    device T* y [[buffer(5)]],                    // [matrices, outputs]
    constant BlockMaskedParams& params [[buffer(6)]],
    thread_of_plane) {
  constexpr int W = pack_size<T>();
  constexpr int R = kRowOutputs;
  constexpr int steps = 2;  // loads of a lane on their way at once, for each row of w
  threadgroup float partials[kProductSimdgroups * R];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const OwnOutputs outputs = outputs_of<R>(params.outputs, group.x * threads.y + thread_at.y);
  const bool is_there = outputs.own < params.outputs;
  const uint first_output = is_there ? outputs.own : params.outputs - 1;
  const auto columns =
      MaskedColumns<T, scaled>::of(mask_of_x, mask_of_w, mask_of_y, group.z, 0, first_output, params);
  x += params.has_one_x ? 0 : size_t(group.z) * params.columns;
  w += params.has_one_w ? 0 : size_t(group.z) * params.matrix_elements;
  w += size_t(outputs.first) * params.weight_stride;
  const uint stride = outputs.alone ? 0 : params.weight_stride;

  float totals[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    totals[r] = 0;
  }
  const uint step = at.sharers * 32 * W;
  const uint end = is_there ? columns.end : 0;
  for (uint column = at.position * W; column < end; column += steps * step) {
    float scales[steps];
    bool has[steps];
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      const uint own = min(column + i * step, end - W);
      scales[i] = columns.scale(own);
      has[i] = column + i * step < end && columns.has(own);
    }
    uint4 activations[steps];
    uint4 weights[steps][R];
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      activations[i] = uint4(0);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        weights[i][r] = uint4(0);
      }
      if (has[i]) {
        activations[i] = load_pack(x + column + i * step, true);
#pragma unroll
        for (int r = 0; r < R; ++r) {
          weights[i][r] = load_pack(w + (column + i * step + r * stride), true);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      float v[W];
      unpack<T>(activations[i], v);
      if constexpr (scaled) {
#pragma unroll
        for (int j = 0; j < W; ++j) {
          v[j] = has[i] ? v[j] * scales[i] : 0.0f;
        }
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        float own[W];
        unpack<T>(weights[i][r], own);
#pragma unroll
        for (int j = 0; j < W; ++j) {
          totals[r] += v[j] * own[j];
        }
      }
    }
  }

  const float sum = sum_of_sharers(totals, at, partials);
  const uint output = outputs.first + lane / (32 / R);
  if (writes<R>(at, outputs, output)) {
    y[size_t(group.z) * params.outputs + output] = T(sum * columns.of_y.value());
  }
}

template <typename T, bool scaled>
[[kernel, max_total_threads_per_threadgroup(32 * kOutputSimdgroups)]] void block_masked_columns_row(
    const device T* x [[buffer(0)]],              // [matrices, columns]
    const device T* w [[buffer(1)]],              // [matrices, columns, outputs]
    const device uchar* mask_of_x [[buffer(2)]],  // [matrices, blocks of columns]
    const device uchar* mask_of_w [[buffer(3)]],  // [matrices, blocks of outputs, blocks of columns]
    const device uchar* mask_of_y [[buffer(4)]],  // [matrices, blocks of outputs]
    device T* y [[buffer(5)]],                    // [matrices, outputs]
    constant BlockMaskedParams& params [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int W = pack_size<T>();
  constexpr int ahead = 4;  // rows of w on their way at once
  threadgroup float scratch[kOutputSimdgroups * 32 * W];
  const OutputLanes at{params.lanes, lane, simdgroup};
  const uint output = (group.x * at.lanes + lane % at.lanes) * W;
  const bool is_there = output < params.outputs;
  const auto columns = MaskedColumns<T, scaled>::of(
      mask_of_x, mask_of_w, mask_of_y, group.z, 0, min(output, params.outputs - 1), params);
  x += params.has_one_x ? 0 : size_t(group.z) * params.columns;
  w += (params.has_one_w ? 0 : size_t(group.z) * params.matrix_elements) + output;
  const uint workers = workers_of(at);
  const uint end = is_there ? columns.end : 0;

  float totals[1][W];
#pragma unroll
  for (int i = 0; i < W; ++i) {
    totals[0][i] = 0;
  }
  for (uint column = worker_of(at); column < end; column += ahead * workers) {
    float values[ahead];
    bool has[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      const uint own = min(column + i * workers, end - 1);
      has[i] = column + i * workers < end && columns.has(own);
      values[i] = scaled ? columns.scale(own) : 1.0f;
    }
    uint4 bits[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      bits[i] = uint4(0);
      const uint own = column + i * workers;
      float x_k = 0;
      if (has[i]) {
        bits[i] = load_pack(w + size_t(own) * params.weight_stride, true);
        x_k = float(x[own]);
      }
      values[i] = has[i] ? values[i] * x_k : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      float v[W];
      unpack<T>(bits[i], v);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        totals[0][j] += values[i] * v[j];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < W; ++i) {
    totals[0][i] *= columns.of_y.value();
  }
  store_outputs<W>(
      totals, at, group.x, params.outputs, 1, group.z, x, y, SplitPlace{0, 1, 0, false}, scratch);
}

instantiate_types("block_masked_mm_row", block_masked_row, false)
instantiate_types("block_masked_mm_row_scaled", block_masked_row, true)
instantiate_types("block_masked_mm_columns_row", block_masked_columns_row, false)
instantiate_types("block_masked_mm_columns_row_scaled", block_masked_columns_row, true)
