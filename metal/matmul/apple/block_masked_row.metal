// matmul/apple/block_masked_mm.metal for one row of x:
//
//   y[n] = my[n] sum_k (x[k] mx[k]) (w[n, k] mw[n, k])        w [outputs, columns]
//   y[n] = my[n] sum_k (x[k] mx[k]) (w[k, n] mw[k, n])        w [columns, outputs], the kernel of columns
//
// rows: simdgroups of a threadgroup share the columns for kRowOutputs outputs, 16 bytes a lane at a time, which lie in
// one block. columns: kMaskedLanes lanes go along the outputs, 16 bytes each, and rows of w are dealt to the others and
// to the simdgroups, one each in a round. Masked blocks are not loaded.
#include <metal_stdlib>

#include "matmul/apple/block_masks.h"
#include "matmul/outputs.h"
#include "matmul/row_products.h"
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
    constant BlockMaskedParams& params [[buffer(6)]], thread_of_plane) {
  constexpr int W = pack_size<T>();
  constexpr int R = kRowOutputs;
  constexpr int steps = 2;  // loads of a lane on their way at once, for each row of w
  threadgroup float partials[kProductSimdgroups * R];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const OwnOutputs outputs = outputs_of<R>(params.outputs, group.x * threads.y + thread_at.y);
  const bool is_there = outputs.own < params.outputs;
  const uint first_output = is_there ? outputs.own : params.outputs - 1;
  const auto columns = MaskedColumns<T, scaled>::of(mask_of_x, mask_of_w, mask_of_y, group.z, 0, first_output, params);
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
    constant BlockMaskedParams& params [[buffer(6)]], lane_of_simdgroup) {
  constexpr int W = pack_size<T>();
  constexpr int ahead = 8;                                          // rows of w on their way at once
  constexpr int workers = kOutputSimdgroups * (32 / kMaskedLanes);  // on the same outputs, each with a row of w
  static_assert(workers <= 32, "rows of all workers lie in one block");
  threadgroup float scratch[kOutputSimdgroups * 32 * W];
  const OutputLanes at{kMaskedLanes, lane, simdgroup};
  const uint output = (group.x * kMaskedLanes + lane % kMaskedLanes) * W;
  const auto columns = MaskedColumns<T, scaled>::of(
      mask_of_x, mask_of_w, mask_of_y, group.z, 0, min(output, params.outputs - 1), params);
  const bool is_there = output < params.outputs && columns.end != 0;
  const uint own = worker_of(at);
  x += (params.has_one_x ? 0 : size_t(group.z) * params.columns) + own;
  w += (params.has_one_w ? 0 : size_t(group.z) * params.matrix_elements) + own * params.weight_stride + output;

  float totals[1][W];
#pragma unroll
  for (int i = 0; i < W; ++i) {
    totals[0][i] = 0;
  }
  // The outputs of a threadgroup may lie in two blocks. A bit for each of 32 rounds of rows of w says whether masks leave it.
  const uint first_output = group.x * kMaskedLanes * W;
  const uint last_output = min(first_output + kMaskedLanes * W, params.outputs) - 1;
  const auto of_first = BlockMask<T, scaled>::of(mask_of_w, params.of_w, group.z, first_output >> params.block_shift);
  const auto of_last = BlockMask<T, scaled>::of(mask_of_w, params.of_w, group.z, last_output >> params.block_shift);
  const bool is_in_last = output >> params.block_shift == last_output >> params.block_shift;
  for (uint first = 0; first < params.columns; first += 32 * workers) {
    const uint column = first + lane * workers;
    const uint block = min(column, params.columns - 1) >> params.block_shift;
    const bool has_x = column < params.columns && columns.of_x.at(block) != 0.0f;
    const uint in_first = simd_or(has_x && of_first.at(block) != 0.0f ? 1u << lane : 0u);
    const uint in_last = simd_or(has_x && of_last.at(block) != 0.0f ? 1u << lane : 0u);
    uint left = !is_there ? 0 : is_in_last ? in_last : in_first;
    while (left != 0) {
      uint4 bits[ahead];
      float values[ahead];
#pragma unroll
      for (int i = 0; i < ahead; ++i) {
        bits[i] = uint4(0);
        values[i] = 0;
        const uint row = first + ctz(left) * workers;
        if (left != 0 && row + own < params.columns) {
          bits[i] = load_pack(w + row * params.weight_stride, true);
          values[i] = float(x[row]);
          if constexpr (scaled) {
            values[i] *= columns.scale(row);
          }
        }
        left &= left - 1;
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
  }
#pragma unroll
  for (int i = 0; i < W; ++i) {
    totals[0][i] *= columns.of_y.value();
  }
  store_outputs<W>(totals, at, group.x, params.outputs, 1, group.z, x, y, SplitPlace{0, 1, 0, false}, scratch);
}

instantiate_types("block_masked_mm_row", block_masked_row, false)
instantiate_types("block_masked_mm_row_scaled", block_masked_row, true)
instantiate_types("block_masked_mm_columns_row", block_masked_columns_row, false)
instantiate_types("block_masked_mm_columns_row_scaled", block_masked_columns_row, true)
