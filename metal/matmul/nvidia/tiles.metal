// Products of several rows of x with affine quantized weights in half types, by 8x8 matrices, on NVIDIA GPUs:
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n],   w[n, k] = scales[n, k / group] * q[n, k] + biases[n, k / group]
//
// A matrix of weights is 8 outputs by 8 columns, one of activations 8 columns by 8 rows of x. The integers are
// multiplied as they are, less some zero that keeps them exact in T; a run of 32 or 64 columns, which have one scale
// and one bias, leaves
//
//   scale * ((q - zero) * x) + (bias + scale * zero) * (1 * x)
//
// Columns meet by pairs, 4 apart (mittens/tile.h). The simdgroups of a threadgroup share out the columns, U runs at a
// time, and load them all before they multiply; each of the four lanes that share a row of weights loads scale and bias
// of one run.
#include <metal_stdlib>

#include "matmul/nvidia/affine_weights.h"
#include "matmul/splitk_mma.h"
#include "mittens/instantiate.h"
#include "mittens/source/integers.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

constant constexpr int tile = 8;

// The integers of matrix u of a run, of a lane's words.
template <typename T, int bits, int words>
inline vec<T, 2> pair_of_run(thread const uint (&from)[words], int u) {
  constexpr uint offset = integer_offset<T>(0x4b000000u);
  const int t = u % 4;
  if constexpr (bits == 4) {
    return integer_pair<T, 4>(from[u / 4], t, offset);
  } else {
    return integer_pair<T, 8>(side_by_side(from[u / 4 * 2], from[u / 4 * 2 + 1], t / 2), t % 2, offset);
  }
}

// A lane's loads of U runs of the weights: its columns of all of them, and scale and bias of one.
template <typename T, int bits, int R, int run, int U>
struct LaneWeights {
  using Values = Integers<bits, run / 4>;
  typename Values::Words integers[R][U];
  vec<T, 2> affine[R];
};

// rows: of the lane's outputs, which are the same or later ones where some are not there.
template <typename T, int bits, int R, int run, int U>
inline void load_weights(
    AffineMatrix<T> w, thread const uint (&rows)[R], uint begin, uint columns, uint lane, uint group_shift,
    thread LaneWeights<T, bits, R, run, U>& to) {
  using Values = typename LaneWeights<T, bits, R, run, U>::Values;
  const uint quarter = tile_column(lane) / 2;
  const device uint* words = w.words + (begin + quarter * (run / 4)) / (32 / bits);
  const uint group = (begin + quarter % U * run) >> group_shift;
#pragma unroll
  for (int n = 0; n < R; ++n) {
#pragma unroll
    for (int g = 0; g < U; ++g) {
      to.integers[n][g] = Values::load(words + g * (run * bits / 32), rows[n] * w.words_stride, 0);
    }
    to.affine[n] = vec<T, 2>(w.scales[rows[n] * w.scales_stride + group], w.biases[rows[n] * w.biases_stride + group]);
  }
}

// A lane's right operands of a run.
template <typename T, int MB, int run>
struct LaneRows {
  vec<T, 2> at[run / tile][MB];
};

// x points at the lane's columns of the first row. Rows past the last repeat it: nobody reads their results.
template <typename T, int MB, int run>
inline void load_rows(const device T* x, uint rows, uint columns, uint lane, thread LaneRows<T, MB, run>& to) {
#pragma unroll
  for (int block = 0; block < MB; ++block) {
#pragma unroll
    for (int j = 0; j < run / 32; ++j) {
      vec<T, 4> row[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint m = min(block * tile + tile_column(lane) + i, rows - 1);
        row[i] = *(const device vec<T, 4>*)(x + m * columns + j * tile);
      }
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        to.at[j * 4 + t][block] = vec<T, 2>(row[0][t], row[1][t]);
      }
    }
  }
}

// sums += w x over run g of those in `weights`.
template <typename T, int bits, int R, int MB, int run, int U>
inline void add_run(
    thread const LaneWeights<T, bits, R, run, U>& weights, int g, thread const LaneRows<T, MB, run>& x, uint lane,
    thread Tile<float, R, MB>& sums) {
  const ushort source = tile_lane(tile_row(lane), 2 * g);
  float2 affine[R];
#pragma unroll
  for (int n = 0; n < R; ++n) {
    const vec<T, 2> own = shuffled<T>(weights.affine[n], source);
    affine[n] = float2(float(own.x), float(own.y));
  }
  Tile<float, R, MB> products;
  Tile<float, 1, MB> activations;
  fill(products, 0.0f);
  fill(activations, 0.0f);
#pragma unroll
  for (int u = 0; u < run / tile; ++u) {
#pragma unroll
    for (int n = 0; n < R; ++n) {
      const vec<T, 2> q = pair_of_run<T, bits>(weights.integers[n][g].at, u);
#pragma unroll
      for (int block = 0; block < MB; ++block) {
        products.at[n][block] = multiply_tiles<T>(q, x.at[u][block], products.at[n][block]);
      }
    }
#pragma unroll
    for (int block = 0; block < MB; ++block) {
      activations.at[0][block] = multiply_tiles<T>(vec<T, 2>(T(1), T(1)), x.at[u][block], activations.at[0][block]);
    }
  }
#pragma unroll
  for (int n = 0; n < R; ++n) {
    const float zero = fma(tile_zero<T, bits>(), affine[n].x, affine[n].y);
#pragma unroll
    for (int block = 0; block < MB; ++block) {
      sums.at[n][block] += affine[n].x * products.at[n][block];
      sums.at[n][block] += zero * activations.at[0][block];
    }
  }
}

// sums += w x over U runs from column `begin` on.
template <int U, typename T, int bits, int run, int R, int MB>
inline void add_runs(
    const device T* x, AffineMatrix<T> w, thread const uint (&rows)[R], uint begin, uint count, uint columns, uint lane,
    uint group_shift, thread Tile<float, R, MB>& sums) {
  LaneWeights<T, bits, R, run, U> weights;
  LaneRows<T, MB, run> activations[U];
  load_weights(w, rows, begin, columns, lane, group_shift, weights);
  x += begin + tile_row(lane) / 2 * (run / 4) + tile_row(lane) % 2 * 4;
#pragma unroll
  for (int g = 0; g < U; ++g) {
    load_rows(x + g * run, count, columns, lane, activations[g]);
  }
#pragma unroll
  for (int g = 0; g < U; ++g) {
    add_run<T, bits>(weights, g, activations[g], lane, sums);
  }
}

// most: threads by which NVIDIA's compiler allots registers: with these no variant spills.
template <typename T, int bits, int R, int MB, int run, int U, int most>
[[kernel, threads_at_most(256, most)]] void quantized_matmul_tiles(
    const device T* x [[buffer(0)]],     // [batch, rows, columns]
    quantized_matrix(w, 1, 2, 3, T),     // [batch, outputs, columns]
    const device T* bias [[buffer(4)]],  // [outputs]
    device T* y [[buffer(5)]],           // [batch, rows, outputs]
    constant QuantizedParams& params [[buffer(6)]], thread_of_simdgroups) {
  using Partials = TilePartials<R, MB>;
  threadgroup float partials[Partials::all];
  constexpr uint width = U * run;

  const uint first_output = group.x * Partials::outputs;
  const uint outputs = min(params.outputs - first_output, uint(Partials::outputs));
  const uint first_row = group.y * Partials::rows;
  const uint count = min(params.rows - first_row, uint(Partials::rows));
  x += (size_t(group.z) * params.rows + first_row) * params.columns;
  const AffineMatrix<T> matrix = matrix_of(w, w_scales, w_biases, params, group.z, first_output);
  // Outputs that are not there stand for the last one, too.
  uint rows[R];
#pragma unroll
  for (int n = 0; n < R; ++n) {
    rows[n] = min(n * tile + tile_row(lane), outputs - 1);
  }

  Tile<float, R, MB> sums;
  fill(sums, 0.0f);
  for (uint begin = simdgroup * width; begin < params.columns; begin += simdgroups * width) {
    if (U == 1 || begin + width <= params.columns) {
      add_runs<U, T, bits, run>(x, matrix, rows, begin, count, params.columns, lane, params.group_shift, sums);
    } else {
      for (uint last = begin; last < params.columns; last += run) {
        add_runs<1, T, bits, run>(x, matrix, rows, last, count, params.columns, lane, params.group_shift, sums);
      }
    }
  }

  leave_sums(sums, partials, simdgroup, tile_row(lane), lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = t; i < Partials::rows * Partials::outputs; i += simdgroups * 32) {
    const uint m = i / Partials::outputs;
    const uint n = i % Partials::outputs;
    if (m < count && n < outputs) {
      const uint output = first_output + n;
      const float sum = left_sum<Partials>(partials, n, m, simdgroups) + (params.has_bias ? float(bias[output]) : 0.0f);
      y[(size_t(group.z) * params.rows + first_row + m) * params.outputs + output] = T(sum);
    }
  }
}

#define instantiate_tile(type, dtype, bits, M, run, most)                                                           \
  instantiate_kernel("quantized_matmul_tiles_" #bits "bit_" #M "_by" #run "_" #dtype, quantized_matmul_tiles, type, \
                     bits, affine_tile_outputs(bits) / 8, M / 8, run, affine_tile_runs(bits, M), most)

#define instantiate_tiles(bits, M, most)                 \
  instantiate_tile(half, float16, bits, M, 32, most)     \
  instantiate_tile(bfloat, bfloat16, bits, M, 32, most)  \
  instantiate_tile(half, float16, bits, M, 64, most)     \
  instantiate_tile(bfloat, bfloat16, bits, M, 64, most)

instantiate_tiles(4, 8, 288)
instantiate_tiles(4, 16, 256)
instantiate_tiles(8, 8, 288)
instantiate_tiles(8, 16, 256)
