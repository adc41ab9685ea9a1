// Products of many rows of x, rounded to integers of 8 bits, with weights of 4 bits, on the matrix units of the M5:
//
//   y[m, n] = sum_g x_scale[m, g] * (scales[n, g] * dot + biases[n, g] * sum of x's integers) + bias[n]
//
// where dot is the sum of products of integers in group g. x and its scales come from matmul/apple/m5/int8_rows.metal,
// with the columns of eight in its order. A threadgroup has kInt8Tile rows and outputs, a quarter for each of its four
// simdgroups. All of them unpack a step of weights into threadgroup memory. Rows of x are padded to whole tiles;
// outputs past the last repeat the last, and are not stored.
//
// Compiled by Metal 4 alone, and launched where the GPU has the units: products of int8 on an M4 are wrong.
#include <metal_stdlib>
#include <metal_tensor>

#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

#include "mittens/instantiate.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

namespace mittens {

enum { kInt8Side = kInt8Tile / 2 };  // rows and outputs of a simdgroup

// Both halves of eight integers of 4 bits as bytes: the integers of even place, then the others.
inline uint2 nibbles(uint word) {
  return uint2(word & 0x0f0f0f0fu, word >> 4 & 0x0f0f0f0fu);
}

// Adds a group. of_w, of_x: scale and bias of the simdgroup's outputs, scale and sum of its rows.
inline int with_group(int sum, int dot, float2 of_w, float2 of_x) {
  const float product = fma(of_w.x, float(dot), of_w.y * of_x.y);
  return as_type<int>(fma(of_x.x, product, as_type<float>(sum)));
}

// Whether each four elements of a lane are neighbours in a row, and 4 divides the first one's output.
template <typename Sums>
inline bool has_runs(thread const Sums& sums) {
  bool has = sums.get_capacity() % 4 == 0;
  for (ushort i = 0; has && i < sums.get_capacity(); ++i) {
    const auto first = sums.get_multidimensional_index(i / 4 * 4);
    const auto at = sums.get_multidimensional_index(i);
    has = sums.is_valid_element(i) && first[0] % 4 == 0 && at[1] == first[1] && at[0] == first[0] + i % 4;
  }
  return simd_and(uint(has)) != 0;
}

}  // namespace mittens

template <typename T, int group_size>
[[kernel, max_total_threads_per_threadgroup(128)]] void qmm_int8(
    const device int8_t* x [[buffer(0)]],         // [padded_rows, columns]
    const device float2* x_scales [[buffer(1)]],  // [columns / group_size, padded_rows]
    const device uint* w [[buffer(2)]],           // [outputs, columns / 8]
    const device T* scales [[buffer(3)]],         // [outputs, columns / group_size]
    const device T* biases [[buffer(4)]],
    const device T* bias [[buffer(5)]],  // [outputs]
    device T* y [[buffer(6)]],           // [rows, outputs]
    constant Int8Params& params [[buffer(7)]], uint3 group [[threadgroup_position_in_grid]],
    uint thread_at [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int step = group_size < 64 ? 64 : group_size;  // columns
  constexpr int groups = step / group_size;
  constexpr int chunk = step / 2;  // columns that a thread unpacks
  threadgroup uint4 staged[kInt8Tile * step / 16];
  threadgroup float2 of_x[groups][kInt8Tile];
  threadgroup float4 of_w[groups][kInt8Tile / 2];  // scale and bias of two outputs
  threadgroup float2* of_outputs = (threadgroup float2*)of_w;

  const uint first_row = group.x * kInt8Tile;
  const uint first_output = group.y * kInt8Tile;
  const uint row = simdgroup / 2 * kInt8Side;
  const uint output = simdgroup % 2 * kInt8Side;
  const uint own = thread_at / 2;  // output that a thread unpacks
  const uint from = thread_at % 2 * chunk;
  const device uint* words = w + size_t(min(first_output + own, params.outputs - 1)) * params.weight_stride;
  threadgroup uint4* to = staged + (own * step + from) / 16;

  using Sizes = dextents<int, 2>;
  using Strides = array<int, 2>;
  const int columns = params.columns;
  tensor<device int8_t, Sizes, tensor_inline> rows_of_x(
      (device int8_t*)x + size_t(first_row + row) * params.columns, Sizes(columns, kInt8Side), Strides{1, columns});
  tensor<threadgroup int8_t, Sizes, tensor_inline> weights(
      (threadgroup int8_t*)staged + output * step, Sizes(step, kInt8Side), Strides{1, step});
  using Left = decltype(rows_of_x.template slice<group_size, kInt8Side>(0, 0));
  using Right = decltype(weights.template slice<group_size, kInt8Side>(0, 0));
  constexpr auto sizes = mpp::tensor_ops::matmul2d_descriptor(kInt8Side, kInt8Side, group_size, false, true);
  mpp::tensor_ops::matmul2d<sizes, execution_simdgroup> op;
  // Sums are floats by their bits: so they have the layout of the products, whichever that is.
  auto dots = op.template get_destination_cooperative_tensor<Left, Right, int>();
  auto sums = op.template get_destination_cooperative_tensor<Left, Right, int>();
  for (ushort i = 0; i < sums.get_capacity(); ++i) {
    sums[i] = 0;
  }
  const bool by_runs = has_runs(dots);

  for (uint begin = 0; begin < params.columns; begin += step) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (begin + from < params.columns) {
      const device uint4* packed = (const device uint4*)(words + (begin + from) / 8);
#pragma unroll
      for (int i = 0; i < chunk / 32; ++i) {
        const uint4 four = packed[i];
        to[2 * i] = uint4(nibbles(four.x), nibbles(four.y));
        to[2 * i + 1] = uint4(nibbles(four.z), nibbles(four.w));
      }
    }
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      const uint at = begin / group_size + g;
      if (at * group_size < params.columns) {
        const uint i = thread_at % kInt8Tile;
        if (thread_at < kInt8Tile) {
          of_x[g][i] = x_scales[size_t(at) * params.padded_rows + first_row + i];
        } else {
          const uint n = min(first_output + i, params.outputs - 1);
          of_outputs[g * kInt8Tile + i] =
              float2(scales[size_t(n) * params.scales_stride + at], biases[size_t(n) * params.biases_stride + at]);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      if (begin + g * group_size < params.columns) {
        auto left = rows_of_x.template slice<group_size, kInt8Side>(int(begin) + g * group_size, 0);
        auto right = weights.template slice<group_size, kInt8Side>(g * group_size, 0);
        op.run(left, right, dots);
        if (by_runs) {
#pragma unroll
          for (ushort i = 0; i < dots.get_capacity(); i += 4) {
            const auto at = dots.get_multidimensional_index(i);
            const float2 of_row = of_x[g][row + at[1]];
            const float4 two = of_w[g][(output + at[0]) / 2];
            const float4 next = of_w[g][(output + at[0]) / 2 + 1];
            sums[i] = with_group(sums[i], dots[i], two.xy, of_row);
            sums[i + 1] = with_group(sums[i + 1], dots[i + 1], two.zw, of_row);
            sums[i + 2] = with_group(sums[i + 2], dots[i + 2], next.xy, of_row);
            sums[i + 3] = with_group(sums[i + 3], dots[i + 3], next.zw, of_row);
          }
        } else {
#pragma unroll
          for (ushort i = 0; i < dots.get_capacity(); ++i) {
            if (dots.is_valid_element(i)) {
              const auto at = dots.get_multidimensional_index(i);
              const float2 of_output = of_outputs[g * kInt8Tile + output + at[0]];
              sums[i] = with_group(sums[i], dots[i], of_output, of_x[g][row + at[1]]);
            }
          }
        }
      }
    }
  }

#pragma unroll
  for (ushort i = 0; i < sums.get_capacity(); ++i) {
    if (sums.is_valid_element(i)) {
      const auto at = sums.get_multidimensional_index(i);
      const uint m = first_row + row + at[1];
      const uint n = first_output + output + at[0];
      if (m < params.rows && n < params.outputs) {
        const float sum = as_type<float>(sums[i]);
        y[size_t(m) * params.outputs + n] = T(params.has_bias ? sum + float(bias[n]) : sum);
      }
    }
  }
}

instantiate_types("quantized_matmul_qmm_int8_32", qmm_int8, 32)
instantiate_types("quantized_matmul_qmm_int8_64", qmm_int8, 64)
instantiate_types("quantized_matmul_qmm_int8_128", qmm_int8, 128)
