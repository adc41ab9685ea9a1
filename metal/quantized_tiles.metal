// Products of 6 to 16 rows of x with affine quantized weights, by 8x8 matrices:
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n],   w[n, k] = scales[n, k / group] * q[n, k] + biases[n, k / group]
//
// A matrix of weights is 8 outputs by 8 columns, one of activations 8 columns by 8 rows of x. The integers are
// multiplied as they are (less their middle, exact in T), four matrices for 32 columns, which have one scale and one
// bias:
//
//   y = sum over 32 columns of scale * (q * x) + (bias + scale * middle) * (1 * x)
//
// In float32 it is the weights that are multiplied: there the rounding of two large sums that cancel would show.
//
// Which columns meet is free as long as both operands agree: of the 8 that a lane loads of a row of weights, matrix t
// takes t and t + 4. The simdgroups of a threadgroup share out the columns, a chunk at a time; the activations of a
// chunk stay in registers while the outputs pass by, 8 at a time.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/quantized_rows.h"
#include "mittens/tile.h"
#include "params/quantized.h"

using namespace metal;
using namespace mittens;

constant constexpr int tile = 8;
constant constexpr int run = 32;              // columns of four matrices
constant constexpr int tile_partials = 4096;  // floats that the simdgroups leave for the last step

// Runs of a chunk: more would not fit the registers beside their activations.
template <int MB>
constexpr int runs() {
  return MB > 1 ? 1 : 2;
}

// Integers t and t + 4 of the 8 in a lane's words, less the middle.
template <typename T, int bits>
inline vec<T, 2> integer_pair(uint2 words, int t) {
  uint pair;
  if constexpr (bits == 4) {
    pair = (words.x >> (4 * t)) & 0x000f000fu;
  } else {
    pair = ((words.x >> (8 * t)) & 0xffu) | (((words.y >> (8 * t)) & 0xffu) << 16);
  }
  constexpr float middle = zero_of<affine<bits>()>();
  if constexpr (is_same_v<T, half>) {
    return as_type<half2>(pair | 0x64006400u) - half2(1024 + middle);  // 1024 + integer
  } else {
    constexpr uint two23 = 0x4b000000u;
    const float lower = as_type<float>((pair & 0xffffu) | two23) - (8388608.0f + middle);
    const float upper = as_type<float>((pair >> 16) | two23) - (8388608.0f + middle);
    return vec<T, 2>(T(lower), T(upper));
  }
}

template <int bits>
inline uint2 load_eight(const device uint* p) {
  if constexpr (bits == 8) {
    return *(const device uint2*)p;
  } else {
    return uint2(*p, 0);
  }
}

// What a lane holds of a chunk's activations: a pair of rows of x for each block of 8 rows, and their sums over each
// run.
template <typename T, int MB>
struct Chunk {
  vec<T, 2> x[runs<MB>()][4][MB];
  float2 sums[runs<MB>()][MB];
};

// x points at the rows of this threadgroup. Columns and rows that are not there are 0.
template <typename T, int MB>
inline void load_chunk(
    const device T* x, uint rows, uint columns, uint begin, uint lane, thread Chunk<T, MB>& chunk) {
  const vec<T, 2> ones = vec<T, 2>(T(1), T(1));
#pragma unroll
  for (int g = 0; g < runs<MB>(); ++g) {
    const uint column = begin + g * run + tile_row(lane) * 4;
#pragma unroll
    for (int block = 0; block < MB; ++block) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const uint row = block * tile + tile_column(lane) + e;
        vec<T, 4> v = vec<T, 4>(T(0), T(0), T(0), T(0));
        if (row < rows && column < columns) {
          v = *(const device vec<T, 4>*)(x + row * columns + column);
        }
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          chunk.x[g][t][block][e] = v[t];
        }
      }
      chunk.sums[g][block] = float2(0);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        if constexpr (!is_same_v<T, float>) {
          chunk.sums[g][block] = multiply_tiles<T>(ones, chunk.x[g][t][block], chunk.sums[g][block]);
        }
      }
    }
  }
}

// What a lane loads of a chunk of one row of weights.
template <int runs>
struct LaneRow {
  uint2 words[runs];
  float scale[runs];
  float bias[runs];
};

template <int bits, int runs, typename T>
inline void load_lane_row(
    AffineWeights<T> w, uint row, bool valid, uint begin, uint columns, uint lane, uint group_shift,
    thread LaneRow<runs>& to) {
#pragma unroll
  for (int g = 0; g < runs; ++g) {
    const uint column = begin + g * run + tile_column(lane) * 4;
    to.words[g] = uint2(0);
    to.scale[g] = 0;
    to.bias[g] = 0;
    if (valid && column < columns) {
      const AffineWeights<T> at = at_column<bits>(w, column, group_shift);
      to.words[g] = load_eight<bits>(at.words + row * at.words_stride);
      to.scale[g] = float(at.scales[row * at.scales_stride]);
      to.bias[g] = float(at.biases[row * at.biases_stride]);
    }
  }
}

// Sums for 8 outputs: of this lane's output, a pair of rows of x for each block of 8 rows.
template <int MB>
struct Sums {
  float2 of[MB];
};

template <typename T, int bits, int MB>
inline void multiply_chunk(
    thread const LaneRow<runs<MB>()>& row, thread const Chunk<T, MB>& chunk, thread Sums<MB>& sums) {
#pragma unroll
  for (int block = 0; block < MB; ++block) {
    sums.of[block] = float2(0);
  }
#pragma unroll
  for (int g = 0; g < runs<MB>(); ++g) {
    Sums<MB> products;
#pragma unroll
    for (int block = 0; block < MB; ++block) {
      products.of[block] = float2(0);
    }
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      vec<T, 2> q = integer_pair<T, bits>(row.words[g], t);
      if constexpr (is_same_v<T, float>) {
        q = fma(q + float(zero_of<affine<bits>()>()), float2(row.scale[g]), float2(row.bias[g]));
      }
#pragma unroll
      for (int block = 0; block < MB; ++block) {
        products.of[block] = multiply_tiles<T>(q, chunk.x[g][t][block], products.of[block]);
      }
    }
#pragma unroll
    for (int block = 0; block < MB; ++block) {
      if constexpr (is_same_v<T, float>) {
        sums.of[block] += products.of[block];
      } else {
        sums.of[block] +=
            row.scale[g] * products.of[block] + middle_bias<bits>(row.scale[g], row.bias[g]) * chunk.sums[g][block];
      }
    }
  }
}

template <typename T, int bits, int MB>
[[kernel, max_total_threads_per_threadgroup(256)]] void quantized_matmul_tiles(
    const device T* x [[buffer(0)]],       // [batch, rows, columns]
    const device uint* w [[buffer(1)]],    // [batch, outputs, columns * bits / 32]
    const device T* scales [[buffer(2)]],  // [batch, outputs, columns / group]
    const device T* biases [[buffer(3)]],  // [batch, outputs, columns / group]
    const device T* bias [[buffer(4)]],    // [outputs]
    device T* y [[buffer(5)]],             // [batch, rows, outputs]
    constant QuantizedParams& params [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  constexpr uint M = MB * tile;
  threadgroup float partials[tile_partials];

  const uint first_output = group.x * params.outputs_per_group;
  const uint outputs = min(params.outputs - first_output, params.outputs_per_group);
  const uint first_row = group.y * M;
  const uint rows = min(params.rows - first_row, M);
  const uint products = params.outputs_per_group * M;  // of a simdgroup
  x += (size_t(group.z) * params.rows + first_row) * params.columns;
  const AffineWeights<T> matrix = matrix_of(w, scales, biases, params, group.z, first_output);

  threadgroup float* own = partials + simdgroup * products + tile_row(lane) * M + tile_column(lane);
  constexpr uint width = runs<MB>() * run;
  const uint step = simdgroups * width;
  for (uint begin = simdgroup * width; begin < params.columns; begin += step) {
    Chunk<T, MB> chunk;
    load_chunk<T, MB>(x, rows, params.columns, begin, lane, chunk);
    for (uint first = 0; first < outputs; first += tile) {
      const uint output = first + tile_row(lane);
      LaneRow<runs<MB>()> row;
      load_lane_row<bits, runs<MB>()>(
          matrix, output, output < outputs, begin, params.columns, lane, params.group_shift, row);
      Sums<MB> sums;
      multiply_chunk<T, bits, MB>(row, chunk, sums);
      if (output < outputs) {
#pragma unroll
        for (int block = 0; block < MB; ++block) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            threadgroup float& partial = own[first * M + block * tile + e];
            partial = begin >= step ? partial + sums.of[block][e] : sums.of[block][e];
          }
        }
      }
    }
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = t; i < outputs * M; i += simdgroups * 32) {
    const uint m = i % M;
    const uint output = first_output + i / M;
    if (m < rows) {
      const float sum = gathered(partials, i, products, simdgroups) + (params.has_bias ? float(bias[output]) : 0.0f);
      y[(size_t(group.z) * params.rows + first_row + m) * params.outputs + output] = T(sum);
    }
  }
}

#define instantiate_tiles(bits, MB, M) \
  instantiate_types("quantized_matmul_tiles_" #bits "bit_" #M, quantized_matmul_tiles, bits, MB)

instantiate_tiles(4, 1, 8)
instantiate_tiles(4, 2, 16)
instantiate_tiles(8, 1, 8)
instantiate_tiles(8, 2, 16)
