// Products of a few rows of x with affine quantized weights that are packed along the outputs, on NVIDIA GPUs:
//
//   y[m, n] = sum_k x[m, k] * w[k, n] + b[n],   w[k, n] = scales[k, n / group] * q[k, n] + biases[k, n / group]
//
// A lane owns 8 outputs; rows of weights are dealt to the lanes and simdgroups left over (matmul/outputs.h), and to
// threadgroups where outputs are few: these leave partial sums, which matmul/splitk_reduce.metal adds up.
#include <metal_stdlib>

#include "matmul/outputs.h"
#include "matmul/nvidia/affine_weights.h"
#include "matmul/splitk.h"
#include "mittens/instantiate.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

constant constexpr int owned = kOwnedOutputs;

// The words that hold a lane's outputs in one row of weights.
template <int bits>
inline uint2 load_owned(const device uint* p) {
  if constexpr (bits == 8) {
    return *(const device uint2*)p;
  } else {
    return uint2(*p, 0);
  }
}

template <int bits>
inline void unpack_owned(uint2 words, uint two23, thread float (&q)[owned]) {
#pragma unroll
  for (int i = 0; i < owned * bits / 32; ++i) {
    float v[32 / bits];
    unpack_word<bits, true>(words[i], two23, v);
#pragma unroll
    for (int j = 0; j < 32 / bits; ++j) {
      q[i * 32 / bits + j] = v[j];
    }
  }
}

template <typename T, int bits, int M>
[[kernel, threads_at_most(256, 384)]] void quantized_matmul_columns(
    const device T* x [[buffer(0)]],     // [batch, rows, columns]
    quantized_matrix(w, 1, 2, 3, T),     // [batch, columns, outputs]
    const device T* bias [[buffer(4)]],  // [outputs]
    device T* y [[buffer(5)]],           // [batch, rows, outputs], or float [splits, batch, rows, outputs]
    constant QuantizedParams& params [[buffer(6)]], uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int ahead = 4;  // rows of weights on their way at once
  threadgroup float scratch[kOutputSimdgroups * 32 * owned];
  const OutputLanes at{params.lanes, lane, simdgroup};
  const uint split = group.y % params.splits;
  const uint first_row = group.y / params.splits * M;
  const uint rows = params.rows - first_row;
  const uint output = (group.x * at.lanes + lane % at.lanes) * owned;
  const bool inside = output < params.outputs;
  const uint end = min(split * params.columns_per_split + params.columns_per_split, params.columns);
  const uint workers = workers_of(at);
  const size_t first_of_batch = size_t(group.z) * params.rows + first_row;
  x += first_of_batch * params.columns;
  const AffineMatrix<T> matrix =
      at_column<bits>(matrix_of(w, w_scales, w_biases, params, group.z, 0), output, params.group_shift);

  float totals[M][owned];  // each times a power of two, see unpack_word
  float bias_totals[M];
#pragma unroll
  for (int m = 0; m < M; ++m) {
    bias_totals[m] = 0;
#pragma unroll
    for (int i = 0; i < owned; ++i) {
      totals[m][i] = 0;
    }
  }
  uint column = split * params.columns_per_split + worker_of(at);
  while (inside && column < end) {
    uint2 words[ahead];
    float row_scales[ahead];
    float row_biases[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      const uint k = column + i * workers;
      words[i] = uint2(0);
      row_scales[i] = 0;
      row_biases[i] = 0;
      if (k < end) {
        const AffineMatrix<T> row = matrix.row(k);
        words[i] = load_owned<bits>(row.words);
        row_scales[i] = float(*row.scales);
        row_biases[i] = float(*row.biases);
      }
    }
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      const uint k = column + i * workers;
      float q[owned];
      unpack_owned<bits>(words[i], params.two23, q);
      if constexpr (is_same_v<T, float>) {  // the weights themselves, as in matmul/row_products.h
#pragma unroll
        for (int j = 0; j < owned; ++j) {
          q[j] = dequantized_weight<bits>(q[j], j % (32 / bits), row_scales[i], row_biases[i]);
        }
      }
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const float x_k = k < end ? float(x[min(uint(m), rows - 1) * params.columns + k]) : 0.0f;
        if constexpr (is_same_v<T, float>) {
#pragma unroll
          for (int j = 0; j < owned; ++j) {
            totals[m][j] += x_k * q[j];
          }
        } else {
          const float scaled = x_k * row_scales[i];
          bias_totals[m] += x_k * middle_bias<bits>(row_scales[i], row_biases[i]);
#pragma unroll
          for (int j = 0; j < owned; ++j) {
            totals[m][j] += scaled * q[j];
          }
        }
      }
    }
    column += ahead * workers;
  }

  const SplitPlace place{
      split, params.splits, size_t(params.matrices) * params.rows * params.outputs, params.has_bias != 0};
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int i = 0; i < owned; ++i) {
      totals[m][i] = totals[m][i] * activation_scale<bits>(i % (32 / bits)) + bias_totals[m];
    }
  }
  store_outputs<owned>(totals, at, group.x, params.outputs, rows, first_of_batch, bias, y, place, scratch);
}

#define instantiate_columns(bits, M) \
  instantiate_types("quantized_matmul_columns_" #bits "bit_" #M, quantized_matmul_columns, bits, M)

instantiate_columns(4, 1)
instantiate_columns(4, 2)
instantiate_columns(4, 4)
instantiate_columns(4, 8)
instantiate_columns(8, 1)
instantiate_columns(8, 2)
instantiate_columns(8, 4)
instantiate_columns(8, 8)
