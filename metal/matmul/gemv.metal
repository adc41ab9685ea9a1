// Products of a few rows of x with a matrix in the types of x, sums in float32:
//
//   gemv_rows     y[m, n] = sum_k x[m, k] * w[n, k] + b[n]
//   gemv_columns  y[m, n] = sum_k x[m, k] * w[k, n] + b[n]
//
// rows: some simdgroups of a threadgroup share out the columns of x for R rows of weights, W elements a lane at a time,
// so that each weight is read once whatever M is; others, in the threadgroup's second dimension, do so for the next R
// rows. columns: a lane owns W outputs, and rows of weights are dealt to the lanes and simdgroups left over. W is 16
// bytes where everything is aligned so, else 1. Where outputs are few, several threadgroups share the columns of x;
// matmul/splitk_reduce.metal then adds up their sums, always in the same order. On NVIDIA GPUs
// matmul/nvidia/gemv_short.metal has one row of x with short rows of weights.
#include <metal_stdlib>

#include "matmul/outputs.h"
#include "matmul/splitk.h"
#include "mittens/instantiate.h"
#include "mittens/pack.h"
#include "mittens/simd_reduce_scatter.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

// Compilers also allot registers by the limits on threads below: all let the 256 of a launch through, and none makes a
// variant spill.

// A lane's loads of R rows.
template <int R>
struct RowBits {
  uint4 row[R];
};

// W elements as raw bits.
template <typename T, int W>
inline uint4 load_elements(const device T* p) {
  if constexpr (W > 1) {
    return load_pack(p, true);
  } else if constexpr (sizeof(T) == 4) {
    return uint4(as_type<uint>(*p), 0, 0, 0);
  } else {
    return uint4(as_type<ushort>(*p), 0, 0, 0);
  }
}

template <typename T, int W>
inline void widen(uint4 bits, thread float (&v)[W]) {
  if constexpr (W > 1) {
    unpack<T>(bits, v);
  } else if constexpr (sizeof(T) == 4) {
    v[0] = as_type<float>(bits.x);
  } else {
    v[0] = float(as_type<T>(ushort(bits.x)));
  }
}

// The first `valid` of R rows, 0 in place of the others.
template <typename T, int W, int R>
inline void load_rows(const device T* p, uint stride, uint valid, thread RowBits<R>& bits) {
  if (valid >= R) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      bits.row[r] = load_elements<T, W>(p + size_t(r) * stride);
    }
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      bits.row[r] = uint4(0);
      if (uint(r) < valid) {
        bits.row[r] = load_elements<T, W>(p + size_t(r) * stride);
      }
    }
  }
}

// totals[r * M + m] += x[m, W columns] * w[r, the same columns]
template <typename T, int W, int M, int R>
inline void add_row(uint4 x, int m, thread const RowBits<R>& bits, thread float (&totals)[R * M]) {
  float v[W];
  widen<T, W>(x, v);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    float w[W];
    widen<T, W>(bits.row[r], w);
#pragma unroll
    for (int i = 0; i < W; ++i) {
      totals[r * M + m] += v[i] * w[i];
    }
  }
}

// The same for all m; x points at these columns of the first row.
template <typename T, int W, int M, int R>
inline void add_rows(
    const device T* x, uint rows, uint columns, thread const RowBits<R>& bits, thread float (&totals)[R * M]) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
    add_row<T, W, M>(load_elements<T, W>(x + min(uint(m), rows - 1) * columns), m, bits, totals);
  }
}

template <typename T, bool packs, int M, int R>
[[ kernel, threads_at_most(
               256, M == 2   ? 640
                    : M == 4 ? 448
                             : 384) ]] void
gemv_rows(
    const device T* x [[buffer(0)]],     // [rows, columns]
    const device T* w [[buffer(1)]],     // [outputs, columns]
    const device T* bias [[buffer(2)]],  // [outputs]
    device T* y [[buffer(3)]],           // [rows, outputs], or float [splits, rows, outputs]
    constant GemvParams& params [[buffer(4)]], thread_of_plane) {
  static_assert(R == gemv_outputs(M), "the plan counts with other outputs");
  constexpr int W = packs ? pack_size<T>() : 1;
  constexpr int C = R * M;
  constexpr int steps = M > 4 ? 1 : 2;  // loads of a lane on their way at once, for each row of weights
  threadgroup float partials[kProductSimdgroups * C];
  const uint sharers = params.sharers;
  const uint sharer = thread_at.x / 32;
  const uint first_output = (group.x * threads.y + thread_at.y) * R;
  const uint valid = first_output < params.outputs ? params.outputs - first_output : 0;  // R or more, or fewer
  const uint first_row = group.y * M;
  const uint rows = params.rows - first_row;
  const uint end = valid == 0 ? 0 : min(group.z * params.columns_per_split + params.columns_per_split, params.columns);
  const uint step = sharers * 32 * W;
  x += size_t(first_row) * params.columns;
  w += size_t(first_output) * params.weight_stride;

  float totals[C];
#pragma unroll
  for (int i = 0; i < C; ++i) {
    totals[i] = 0;
  }
  uint column = group.z * params.columns_per_split + (sharer * 32 + lane) * W;
  if constexpr (M <= 2) {
    // The last columns do not wait for the columns before them, nor weights for x: short rows are little else.
    for (; column < end; column += steps * step) {
      RowBits<M> activations[steps];
      RowBits<R> weights[steps];
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        const bool there = i == 0 || column + i * step < end;
        load_rows<T, W>(x + column + i * step, params.columns, there ? rows : 0, activations[i]);
      }
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        const bool there = i == 0 || column + i * step < end;
        load_rows<T, W>(w + column + i * step, params.weight_stride, there ? valid : 0, weights[i]);
      }
#pragma unroll
      for (int i = 0; i < steps; ++i) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
          add_row<T, W, M>(activations[i].row[m], m, weights[i], totals);
        }
      }
    }
  } else {
    for (; column + (steps - 1) * step < end; column += steps * step) {
      RowBits<R> weights[steps];
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        load_rows<T, W>(w + column + i * step, params.weight_stride, valid, weights[i]);
      }
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        add_rows<T, W, M>(x + column + i * step, rows, params.columns, weights[i], totals);
      }
    }
    if (steps > 1 && column < end) {
      RowBits<R> weights;
      load_rows<T, W>(w + column, params.weight_stride, valid, weights);
      add_rows<T, W, M>(x + column, rows, params.columns, weights, totals);
    }
  }

  simd_reduce_scatter(totals, lane);
  constexpr int lanes = 32 / C;
  float sum = totals[0];
  uint index = lane % lanes == 0 ? lane / lanes : C;  // of the sum, r * M + m
  if (sharers > 1) {
    threadgroup float* own = partials + thread_at.y * sharers * C;
    if (index < C) {
      own[sharer * C + index] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    index = thread_at.x;
    sum = 0;
#pragma unroll
    for (int s = 0; s < kProductSimdgroups; ++s) {
      if (index < C && uint(s) < sharers) {
        sum += own[s * C + index];
      }
    }
  }
  const uint r = index / M;
  const uint m = index % M;
  if (index < C && r < valid && m < rows) {
    const uint output = first_output + r;
    const SplitPlace place{group.z, params.splits, size_t(params.rows) * params.outputs, params.has_bias != 0};
    store_split(y, size_t(first_row + m) * params.outputs + output, sum, bias, output, place);
  }
}

template <typename T, bool packs, int M>
[[ kernel, threads_at_most(256, packs ? 384 : 512) ]] void gemv_columns(
    const device T* x [[buffer(0)]],     // [rows, columns]
    const device T* w [[buffer(1)]],     // [columns, outputs]
    const device T* bias [[buffer(2)]],  // [outputs]
    device T* y [[buffer(3)]],           // [rows, outputs], or float [splits, rows, outputs]
    constant GemvParams& params [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int W = packs ? pack_size<T>() : 1;
  constexpr int ahead = M > 4 ? 2 : 4;  // rows of weights on their way at once
  threadgroup float scratch[kOutputSimdgroups * 32 * W];
  const OutputLanes at{params.lanes, lane, simdgroup};
  const uint first_row = group.y * M;
  const uint rows = params.rows - first_row;
  const uint output = (group.x * at.lanes + lane % at.lanes) * W;
  const bool inside = output < params.outputs;
  const uint end = min(group.z * params.columns_per_split + params.columns_per_split, params.columns);
  const uint workers = workers_of(at);
  x += size_t(first_row) * params.columns;

  float totals[M][W];
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      totals[m][i] = 0;
    }
  }
  uint column = group.z * params.columns_per_split + worker_of(at);
  while (inside && column < end) {
    uint4 bits[ahead];
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      bits[i] = uint4(0);
      if (column + i * workers < end) {
        bits[i] = load_elements<T, W>(w + size_t(column + i * workers) * params.weight_stride + output);
      }
    }
#pragma unroll
    for (int i = 0; i < ahead; ++i) {
      float v[W];
      widen<T, W>(bits[i], v);
      const uint k = min(column + i * workers, end - 1);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const float x_k = column + i * workers < end ? float(x[min(uint(m), rows - 1) * params.columns + k]) : 0.0f;
#pragma unroll
        for (int j = 0; j < W; ++j) {
          totals[m][j] += x_k * v[j];
        }
      }
    }
    column += ahead * workers;
  }

  const SplitPlace place{group.z, params.splits, size_t(params.rows) * params.outputs, params.has_bias != 0};
  store_outputs<W>(totals, at, group.x, params.outputs, rows, first_row, bias, y, place, scratch);
}

#define instantiate_gemv(M)                                              \
  instantiate_types("gemv_rows_single_" #M "x4", gemv_rows, false, M, 4) \
  instantiate_types("gemv_columns_pack_" #M, gemv_columns, true, M)      \
  instantiate_types("gemv_columns_single_" #M, gemv_columns, false, M)

instantiate_gemv(1)
instantiate_gemv(2)
instantiate_gemv(4)
instantiate_gemv(8)
instantiate_types("gemv_rows_single_16x2", gemv_rows, false, 16, 2)
// Of more rows in packs matmul/gemv_tiles.metal has all, but for exact products.
instantiate_types("gemv_rows_pack_1x4", gemv_rows, true, 1, 4)
instantiate_types("gemv_rows_pack_2x4", gemv_rows, true, 2, 4)
instantiate_types("gemv_rows_pack_4x4", gemv_rows, true, 4, 4)
instantiate_types("gemv_rows_pack_8x4", gemv_rows, true, 8, 4)
