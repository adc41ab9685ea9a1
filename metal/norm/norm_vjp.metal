// Gradients of rms_norm and layer_norm. With g = dy * (weight + offset), mean = 0 for rms_norm and
// n = 1 / sqrt(variance + eps):
//
//   dx[r, c]   = n g - n^3 mean_c(g (x - mean)) (x - mean) - n mean_c(g) + dsum        (mean_c(g) taken 0 for rms_norm)
//   dweight[c] = sum_r dy (x - mean) n,   dbias[c] = sum_r dy
//
// x, dy, dsum, dx [rows, columns], weight [columns] or absent. dsum is the gradient of add_rms_norm's other output, or
// absent. float32 inside. Block b of threads takes rows b, b + blocks, ...: its share of dweight (and dbias) stays in
// registers, goes to partials [2][blocks, columns], and column_sum adds the blocks up in a fixed order, so that the
// result is the same from run to run. dx may be x, dy or dsum.
//
//   simd     one simdgroup a row; the simdgroups of a threadgroup add up their shares before they leave them
//   block    one threadgroup a row, the row in registers: x and dy are read once
//   statistics, coefficients, columns   for rows too long for registers: sums of each part of a row (SplitSums of
//            mittens/row_op.h), merged to four numbers a row, then each thread goes down the rows in its columns
#include <metal_stdlib>

#include "mittens/row_gradient.h"
#include "mittens/welford.h"

using namespace metal;
using namespace mittens;

// Of some elements of a row: moments of x, sums of g and of g (x - mean). For rms_norm mean and g are 0.
template <bool Centred>
struct VjpSums {
  Moments moments;
  float g;
  float products;
};

template <typename T, bool Centred>
inline VjpSums<Centred> merge(VjpSums<Centred> a, VjpSums<Centred> b) {
  if (!Centred) {
    return {Moments{0, 0, a.moments.m2 + b.moments.m2}, 0, a.products + b.products};
  }
  const Moments all = merge<T>(a.moments, b.moments);
  const float products =
      a.products + b.products + a.g * (a.moments.mean - all.mean) + b.g * (b.moments.mean - all.mean);
  return {all, a.g + b.g, products};
}

template <typename T, int L, bool Centred>
inline VjpSums<Centred> across(VjpSums<Centred> own, uint lane, float total) {
  if (!Centred) {
    return {Moments{0, 0, lanes_sum<L>(own.moments.m2)}, 0, lanes_sum<L>(own.products)};
  }
  const Moments all = across<T, L>(own.moments, lane, total);
  const float products = own.products + own.g * (own.moments.mean - all.mean);
  return {all, lanes_sum<L>(own.g), lanes_sum<L>(products)};
}

template <typename P, bool Centred>
inline void write_stat(P p, VjpSums<Centred> s) {
  write_stat(p, s.moments);
  p[3] = s.g;
  p[4] = s.products;
}

template <typename P, bool Centred>
inline void read_stat(P p, thread VjpSums<Centred>& s) {
  read_stat(p, s.moments);
  s.g = p[3];
  s.products = p[4];
}

// Count and mean of a thread's elements of x.
template <typename T, int K, int N>
inline Moments mean_of(thread const RowParts<T, K, N>& parts, RowBatch batch) {
  float sum = batch.edge ? add_scaled(0.0f, float(parts.edges[0])) : 0.0f;
  uint count = batch.edge ? 1 : 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float x[16 / sizeof(T)];
    unpack<T>(parts.packs[0][i], x);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      sum = add_scaled(sum, x[j]);
    }
    count += batch.has(i) ? pack_size<T>() : 0;
  }
  return Moments{float(count), scaled_mean(sum, max(float(count), 1.0f)), 0};
}

// The op that dx is, with inputs x, dy, weight and dsum, which layer_norm leaves alone.
template <typename T, bool Centred>
struct NormVjp {
  using Element = T;
  using Stat = VjpSums<Centred>;
  using Row = float4;  // half_mean, n, slope, shift: dx = n g - slope c - shift with c = x, or half of x - mean
  enum { inputs = 4, weights = 0, reduces = 1, numbers = 5, adds = !Centred };
  static constant constexpr float fill = 0;
  RowInput<T> rows[4];
  RowOutput<T> y;
  float eps;
  float weight_offset;
  bool whole;  // of kernels that deal columns: packs of the weight are aligned

  Stat none() const {
    return Stat{Moments{0, 0, 0}, 0, 0};
  }
  float centred(float x, float half_mean) const {
    return Centred ? half_centred(x, half_mean) : x;
  }
  // The factor of dy: 1 where there is no weight, and then no offset.
  float scale(float weight) const {
    return Centred ? weight : weight + weight_offset;
  }
  // A pack of the weight in the kernels that deal columns.
  uint4 weight_pack(RowBatch batch, int i) const {
    const bool there = !rows[2].absent && batch.has(i);
    return there ? load_pack(rows[2].data + batch.pack(i) * pack_size<T>(), whole) : pack_of<T>(1.0f);
  }
  float share(float x, float dy, Row row) const {
    return dy * (centred(x, row.x) * (Centred ? 2.0f * row.y : row.y));
  }
  template <int N>
  Stat of(thread const RowParts<T, inputs, N>& row, RowBatch batch) const {
    RowParts<T, inputs, N> parts = row;
    Stat s = none();
    if (Centred) {
      s.moments = mean_of(parts, batch);
      if (!is_nvidia && N > 1) {
        unpack_again(parts, rows[0], batch);
      }
    }
    const float half_mean = 0.5f * s.moments.mean;
    float3 sums = float3(0);  // of c^2, g c and g
    if (batch.edge) {
      const float c = centred(float(parts.edges[0]), half_mean);
      const float g = float(parts.edges[1]) * scale(float(parts.edges[2]));
      sums = float3(c * c, g * c, g);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (!Centred || batch.has(i)) {
        float c[16 / sizeof(T)];
        float g[16 / sizeof(T)];
        float w[16 / sizeof(T)];
        unpack<T>(parts.packs[0][i], c);
        unpack<T>(parts.packs[1][i], g);
        unpack<T>(late_weights(N) ? weight_pack(batch, i) : parts.packs[2][i], w);
#pragma unroll
        for (int j = 0; j < pack_size<T>(); ++j) {
          c[j] = centred(c[j], half_mean);
          g[j] *= scale(w[j]);
          sums.x += c[j] * c[j];
          sums.y += g[j] * c[j];
          sums.z += g[j];
        }
      }
    }
    s.moments.m2 = Centred ? 4.0f * sums.x : sums.x;
    s.products = Centred ? 2.0f * sums.y : sums.y;
    s.g = Centred ? sums.z : 0.0f;
    return s;
  }
  Row done(Stat s, uint columns) const {
    const float count = float(columns);
    const float n = precise::rsqrt(s.moments.m2 / count + eps);
    // Where the squares overflow the products may do so too.
    const float slope = n > 0.0f ? (Centred ? 2.0f : 1.0f) * n * n * n * (s.products / count) : 0.0f;
    return float4(0.5f * s.moments.mean, n, slope, n * (s.g / count));
  }
  template <int W>
  void write(thread float (&v)[inputs][W], thread const float (&)[1][W], Row row) const {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      const float dx = row.y * (v[1][i] * scale(v[2][i])) - row.z * centred(v[0][i], row.x);
      v[0][i] = Centred ? dx - row.w : dx + v[3][i];
    }
  }
};

// dweight's and dbias' parts of partials, if they are wanted.
template <typename T, int N>
inline void store_shares(
    device float* partials, constant NormVjpParams& params, bool centred, uint block, thread const Shares<T, N>& shares,
    RowBatch batch) {
  const size_t columns = params.arrays.row.columns;
  if (params.partial_sums > 0) {
    store_sums<T, N>(partials + block * columns, shares.weight, params.arrays.row, batch);
  }
  if (centred && params.partial_sums == 2) {
    store_sums<T, N>(partials + (params.blocks + block) * columns, shares.bias, params.arrays.row, batch);
  }
}

template <typename T, bool Centred>
inline NormVjp<T, Centred> vjp_op(
    const device T* x, const device T* weight, const device T* dy, const device T* dsum, device T* dx,
    constant NormVjpParams& params) {
  constant RowOpParams& arrays = params.arrays;
  const RowInput<T> weights = {weight, arrays.weight_phases[0], true, arrays.has_weights[0] == 0};
  const RowInput<T> added = {dsum, arrays.row_phases[3], false, params.has_dsum == 0};
  return NormVjp<T, Centred>{
      {input_of(x, arrays, 0), input_of(dy, arrays, 1), weights, added},
      output_of(dx, arrays, 0),
      arrays.eps,
      arrays.weight_offsets[0]};
}

template <typename T, int N, bool Centred>
[[kernel, max_total_threads_per_threadgroup(256)]] void norm_vjp_simd(
    const device T* x [[buffer(0)]],       // [rows, columns]
    const device T* weight [[buffer(1)]],  // [columns]
    const device T* dy [[buffer(2)]],      // [rows, columns]
    const device T* dsum [[buffer(3)]],    // [rows, columns]
    device T* dx [[buffer(4)]],            // [rows, columns]
    device float* partials [[buffer(5)]],  // [2][blocks, columns]
    constant NormVjpParams& params [[buffer(6)]], row_thread_parameters) {
  constexpr uint most_columns = 32 * N * 16 / sizeof(T);
  threadgroup float combined[Centred ? 2 * most_columns : most_columns];
  constant RowParams& geometry = params.arrays.row;
  const RowBatch batch = column_batch<T>(geometry, lane, lane, 32, geometry.columns, true);
  const Shares<T, N> shares = vjp_rows<N, false>(
      vjp_op<T, Centred>(x, weight, dy, dsum, dx, params), LaneTeam<32>{lane, 32, lane, geometry.columns}, geometry,
      group * simdgroups + simdgroup, params.blocks * simdgroups, batch);
  if (params.partial_sums == 0) {
    return;
  }
  // One simdgroup after the other, so that the order of the sum is fixed.
  for (uint turn = 0; turn < simdgroups; ++turn) {
    if (simdgroup == turn) {
      add_sums<T, N>(combined, shares.weight, params.arrays.row, batch, turn == 0);
      if (Centred) {
        add_sums<T, N>(combined + most_columns, shares.bias, params.arrays.row, batch, turn == 0);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint column = t; column < geometry.columns; column += threads) {
    partials[size_t(group) * geometry.columns + column] = combined[column];
    if (Centred && params.partial_sums == 2) {
      partials[size_t(params.blocks + group) * geometry.columns + column] = combined[most_columns + column];
    }
  }
}

template <typename T, int N, bool Centred>
[[ kernel, threads_at_most(N == 1 ? 256 : 512, 512) ]] void norm_vjp_block(
    const device T* x [[buffer(0)]],       // [rows, columns]
    const device T* weight [[buffer(1)]],  // [columns]
    const device T* dy [[buffer(2)]],      // [rows, columns]
    const device T* dsum [[buffer(3)]],    // [rows, columns]
    device T* dx [[buffer(4)]],            // [rows, columns]
    device float* partials [[buffer(5)]],  // [2][blocks, columns]
    constant NormVjpParams& params [[buffer(6)]], row_thread_parameters) {
  threadgroup float scratch[2 * 160];
  // On NVIDIA GPUs a thread of two packs of a half type has registers left for the next row.
  constexpr bool ahead = N == 1 || (N == 2 && (sizeof(T) == 4 || (is_nvidia && !Centred)));
  constant RowParams& geometry = params.arrays.row;
  const RowBatch batch = column_batch<T>(geometry, t, t, threads, geometry.columns, true);
  const Shares<T, N> shares = vjp_rows<N, ahead>(
      vjp_op<T, Centred>(x, weight, dy, dsum, dx, params), threadgroup_team(geometry, row_thread, scratch), geometry,
      group, params.blocks, batch);
  store_shares(partials, params, Centred, group, shares, batch);
}

template <typename T, bool Centred>
[[kernel, max_total_threads_per_threadgroup(256)]] void norm_vjp_statistics(
    const device T* x [[buffer(0)]],         // [rows, columns]
    const device T* weight [[buffer(1)]],    // [columns]
    const device T* dy [[buffer(2)]],        // [rows, columns]
    device float* statistics [[buffer(3)]],  // [rows, splits, 5]
    constant NormVjpParams& params [[buffer(4)]], row_thread_parameters) {
  threadgroup float scratch[160];
  NormVjp<T, Centred> op = vjp_op<T, Centred>(x, weight, dy, nullptr, nullptr, params);
  op.rows[3].absent = true;
  run_rows(SplitSums(), NoOp(), op, params.arrays.row, row_thread, scratch, statistics);
}

// One simdgroup a row.
template <bool Centred>
[[kernel, max_total_threads_per_threadgroup(256)]] void norm_vjp_coefficients(
    const device float* statistics [[buffer(0)]],  // [rows, splits, 5]
    device float4* coefficients [[buffer(1)]],     // [rows]: half_mean, n, slope, shift
    constant NormVjpParams& params [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  constant RowParams& geometry = params.arrays.row;
  const uint row = group * simdgroups + simdgroup;
  if (row >= geometry.rows) {
    return;
  }
  const NormVjp<float, Centred> op = {{}, {}, params.arrays.eps};
  VjpSums<Centred> all = op.none();
  for (uint i = lane; i < geometry.splits; i += 32) {
    VjpSums<Centred> part;
    read_stat(statistics + 5 * (size_t(row) * geometry.splits + i), part);
    all = merge<float>(all, part);
  }
  const float4 terms = op.done(across<float, 32>(all, lane, float(geometry.columns)), geometry.columns);
  if (lane == 0) {
    coefficients[row] = terms;
  }
}

// Threadgroups are numbered block by block; within a block each takes a pack of columns a thread.
template <typename T, bool Centred>
[[kernel, max_total_threads_per_threadgroup(256)]] void norm_vjp_columns(
    const device T* x [[buffer(0)]],                  // [rows, columns]
    const device T* weight [[buffer(1)]],             // [columns]
    const device T* dy [[buffer(2)]],                 // [rows, columns]
    const device T* dsum [[buffer(3)]],               // [rows, columns]
    const device float4* coefficients [[buffer(4)]],  // [rows]
    device T* dx [[buffer(5)]],                       // [rows, columns]
    device float* partials [[buffer(6)]],             // [2][blocks, columns]
    constant NormVjpParams& params [[buffer(7)]], uint group [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  constant RowParams& geometry = params.arrays.row;
  const uint group_columns = threads * pack_size<T>();
  const uint groups = (geometry.columns + group_columns - 1) / group_columns;
  const uint block = group / groups;
  const uint begin = group % groups * threads;
  const RowBatch batch = column_batch<T>(geometry, begin + t, t, threads, begin + threads, begin == 0);
  const Shares<T, 1> shares = vjp_rows<1, false>(
      vjp_op<T, Centred>(x, weight, dy, dsum, dx, params), KnownRows{coefficients}, geometry, block, params.blocks,
      batch);
  store_shares(partials, params, Centred, block, shares, batch);
}

// dweight = sum over blocks of partials[0], dbias of partials[1]: 32 columns a threadgroup, each simdgroup takes every
// S-th block; there are S of them, or as many as blocks. Threadgroups are numbered output by output, from `first` on.
template <typename T, int S>
[[kernel, max_total_threads_per_threadgroup(32 * S)]] void norm_vjp_column_sum(
    const device float* partials [[buffer(0)]],  // [2][blocks, columns]
    device T* dweight [[buffer(1)]],             // [columns]
    device T* dbias [[buffer(2)]],               // [columns]
    constant ColumnSumParams& params [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  threadgroup float scratch[S][32];
  const uint groups = (params.columns + 31) / 32;
  const uint which = params.first + group / groups;
  const uint column = (group % groups) * 32 + lane;
  float sum = 0;
  if (column < params.columns) {
    const device float* p = partials + size_t(which) * params.blocks * params.columns + column;
    // So many at a time are on their way, the last ones too.
    constexpr uint at_once = 16;
    for (uint first = simdgroup; first < params.blocks; first += at_once * S) {
      float shares[at_once];
#pragma unroll
      for (uint i = 0; i < at_once; ++i) {
        const uint block = first + i * S;
        shares[i] = 0;
        if (block < params.blocks) {
          shares[i] = p[size_t(block) * params.columns];
        }
      }
#pragma unroll
      for (uint i = 0; i < at_once; ++i) {
        sum += shares[i];
      }
    }
  }
  scratch[simdgroup][lane] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0 && column < params.columns) {
    float total = 0;
#pragma unroll
    for (uint s = 0; s < S; ++s) {
      total += s < params.blocks ? scratch[s][lane] : 0.0f;
    }
    if (which == 0) {
      dweight[column] = T(total);
    } else {
      dbias[column] = T(total);
    }
  }
}

instantiate_types("rms_norm_vjp_simd1", norm_vjp_simd, 1, false)
instantiate_types("rms_norm_vjp_simd2", norm_vjp_simd, 2, false)
instantiate_types("rms_norm_vjp_block1", norm_vjp_block, 1, false)
instantiate_types("rms_norm_vjp_block2", norm_vjp_block, 2, false)
instantiate_kernel("rms_norm_vjp_block4_float32", norm_vjp_block, float, 4, false)
instantiate_types("rms_norm_vjp_statistics", norm_vjp_statistics, false)
instantiate_kernel("rms_norm_vjp_coefficients", norm_vjp_coefficients, false)
instantiate_types("rms_norm_vjp_columns", norm_vjp_columns, false)
instantiate_types("layer_norm_vjp_simd1", norm_vjp_simd, 1, true)
instantiate_types("layer_norm_vjp_simd2", norm_vjp_simd, 2, true)
instantiate_types("layer_norm_vjp_block1", norm_vjp_block, 1, true)
instantiate_types("layer_norm_vjp_block2", norm_vjp_block, 2, true)
instantiate_kernel("layer_norm_vjp_block4_float32", norm_vjp_block, float, 4, true)
instantiate_types("layer_norm_vjp_statistics", norm_vjp_statistics, true)
instantiate_kernel("layer_norm_vjp_coefficients", norm_vjp_coefficients, true)
instantiate_types("layer_norm_vjp_columns", norm_vjp_columns, true)
instantiate_types("norm_vjp_column_sum", norm_vjp_column_sum, 16)
