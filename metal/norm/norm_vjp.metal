// Gradients of rms_norm and layer_norm. With g = dy * weight, mean = 0 for rms_norm, n = 1 / sqrt(variance + eps):
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
//   statistics, coefficients, columns   for rows too long for registers: partial sums of each part of a row, merged to
//            four numbers a row, then each thread goes down the rows in the columns it keeps
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/reduce.h"
#include "norm/columns.h"
#include "norm/welford.h"
#include "params/norm.h"

using namespace metal;
using namespace mittens;

// dx = n g - slope c - shift, c = x - mean; layer_norm takes half of x - mean for c, which does not overflow, and twice
// the slope.
struct Coefficients {
  float half_mean;
  float n;
  float slope;
  float shift;
};

// From the row's sums of (x - mean)^2, g (x - mean) and g.
template <bool Centred>
inline Coefficients row_coefficients(float mean, float squares, float products, float g, uint columns, float eps) {
  const float count = float(columns);
  Coefficients c;
  c.half_mean = 0.5f * mean;
  c.n = precise::rsqrt(squares / count + eps);
  // Where the squares overflow the products may do so too.
  c.slope = c.n > 0.0f ? (Centred ? 2.0f : 1.0f) * c.n * c.n * c.n * (products / count) : 0.0f;
  c.shift = Centred ? c.n * (g / count) : 0.0f;
  return c;
}

// The thread's columns of a row that may be absent: then zeros.
template <typename T, int N>
inline void load_part_if(bool there, const device T* row, ColumnMap map, thread ColumnPart<N>& part) {
  map.end = there ? map.end : 0;
  load_part(row, map, part);
}

// The weight of the thread's columns. In float32 it is 1 where there is none: a choice between dy and dy * weight would
// take registers for both. In half types the choice keeps the weight packed.
template <typename T, int N>
inline void load_weight(const device T* weight, bool has_weight, ColumnMap map, thread ColumnPart<N>& part) {
  load_part_if(has_weight, weight, map, part);
  if (is_same_v<T, float> && !has_weight) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      part.packs[i] = pack_of<T>(1.0f);
    }
  }
}

// dsum of the thread's columns, zeros where there is none, as for layer_norm: on its way while the row's sums are taken.
template <bool Centred, typename T, int N>
inline void load_dsum(const device T* row, bool has_dsum, ColumnMap map, thread ColumnPart<N>& part) {
  if (!Centred) {
    load_part_if(has_dsum, row, map, part);
  }
}

// g = dy * weight of one pack, and centred = x, or half of x - mean if Centred; zeros outside the columns.
template <typename T, bool Centred>
inline void load_terms(
    uint4 x, uint4 dy, uint4 weight, bool has_weight, float half_mean, ColumnMap map, uint i,
    thread float (&centred)[16 / sizeof(T)], thread float (&g)[16 / sizeof(T)]) {
  unpack<T>(x, centred);
  unpack<T>(dy, g);
  if (is_same_v<T, float> || has_weight) {
    float w[16 / sizeof(T)];
    unpack<T>(weight, w);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      g[j] *= w[j];
    }
  }
  if (Centred) {
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      centred[j] = column_of<T>(map, i) + j < map.end ? half_centred(centred[j], half_mean) : 0.0f;
    }
  }
}

// What a thread adds to the row's sums: x: (x - mean)^2, y: g (x - mean), z: g.
template <typename T, int N, bool Centred>
inline float3 part_sums(
    thread const ColumnPart<N>& x, thread const ColumnPart<N>& dy, thread const ColumnPart<N>& weight, bool has_weight,
    float mean, ColumnMap map) {
  const float half_mean = 0.5f * mean;
  float3 sums = float3(0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float centred[16 / sizeof(T)];
    float g[16 / sizeof(T)];
    load_terms<T, Centred>(x.packs[i], dy.packs[i], weight.packs[i], has_weight, half_mean, map, i, centred, g);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      sums.x += centred[j] * centred[j];
      sums.y += g[j] * centred[j];
      sums.z += g[j];
    }
  }
  return Centred ? sums * float3(4.0f, 2.0f, 1.0f) : sums;
}

// Scaled, as scaled_mean takes it.
template <typename T, int N>
inline float columns_sum(thread const ColumnPart<N>& x) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float v[16 / sizeof(T)];
    unpack<T>(x.packs[i], v);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      sum = add_scaled(sum, v[j]);
    }
  }
  return sum;
}

// A thread's share of dweight and dbias, in its columns; if Centred of half of dweight until `finish`.
template <typename T, int N>
struct Shares {
  float weight[N][16 / sizeof(T)];
  float bias[N][16 / sizeof(T)];
};

template <typename T, int N>
inline void clear(thread Shares<T, N>& shares) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      shares.weight[i][j] = 0;
      shares.bias[i][j] = 0;
    }
  }
}

// What a thread's shares are once it is through with its rows.
template <bool Centred, typename T, int N>
inline void finish(thread Shares<T, N>& shares) {
#pragma unroll
  for (int i = 0; Centred && i < N; ++i) {
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      shares.weight[i][j] *= 2.0f;
    }
  }
}

// Writes one row's dx and adds to the shares.
template <typename T, int N, bool Centred>
inline void write_row(
    thread const ColumnPart<N>& x, thread const ColumnPart<N>& dy, thread const ColumnPart<N>& weight,
    thread const ColumnPart<N>& dsum, device T* dx_row, constant NormVjpParams& params, Coefficients c, ColumnMap map,
    thread Shares<T, N>& shares) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float centred[16 / sizeof(T)];
    float g[16 / sizeof(T)];
    float dx[16 / sizeof(T)];
    float gradient[16 / sizeof(T)];
    load_terms<T, Centred>(
        x.packs[i], dy.packs[i], weight.packs[i], params.has_weight, c.half_mean, map, i, centred, g);
    unpack<T>(dy.packs[i], gradient);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      dx[j] = c.n * g[j] - c.slope * centred[j] - c.shift;
      shares.weight[i][j] += gradient[j] * (centred[j] * c.n);
      if (Centred) {
        shares.bias[i][j] += gradient[j];
      }
    }
    if (!Centred) {
      float added[16 / sizeof(T)];
      unpack<T>(dsum.packs[i], added);
#pragma unroll
      for (int j = 0; j < pack_size<T>(); ++j) {
        dx[j] += added[j];
      }
    }
    store_columns(dx_row, map, i, dx);
  }
}

template <typename T, int N, bool Centred>
[[kernel, max_total_threads_per_threadgroup(256)]] void norm_vjp_simd(
    const device T* x [[buffer(0)]],        // [rows, columns]
    const device T* weight [[buffer(1)]],   // [columns]
    const device T* dy [[buffer(2)]],       // [rows, columns]
    const device T* dsum [[buffer(3)]],     // [rows, columns]
    device T* dx [[buffer(4)]],             // [rows, columns]
    device float* partials [[buffer(5)]],   // [2][blocks, columns]
    constant NormVjpParams& params [[buffer(6)]],
    uint group [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  constexpr uint most_columns = 32 * N * 16 / sizeof(T);
  threadgroup float combined[Centred ? 2 * most_columns : most_columns];
  const uint columns = params.row.columns;
  const ColumnMap map = ColumnMap{params.row.whole != 0, lane, 32, 0, columns};

  ColumnPart<N> w;
  ColumnPart<N> x_part;
  ColumnPart<N> dy_part;
  ColumnPart<N> dsum_part;
  load_weight(weight, params.has_weight, map, w);
  Shares<T, N> shares;
  clear(shares);
  for (uint row = group * simdgroups + simdgroup; row < params.row.rows; row += params.blocks * simdgroups) {
    const size_t start = size_t(row) * columns;
    load_part(x + start, map, x_part);
    load_part(dy + start, map, dy_part);
    load_dsum<Centred>(dsum + start, params.has_dsum, map, dsum_part);
    const float mean = Centred ? scaled_mean(simd_sum(columns_sum<T>(x_part)), float(columns)) : 0.0f;
    const float3 own = part_sums<T, N, Centred>(x_part, dy_part, w, params.has_weight, mean, map);
    const float g = Centred ? simd_sum(own.z) : 0.0f;
    const Coefficients c =
        row_coefficients<Centred>(mean, simd_sum(own.x), simd_sum(own.y), g, columns, params.eps);
    write_row<T, N, Centred>(x_part, dy_part, w, dsum_part, dx + start, params, c, map, shares);
  }
  finish<Centred>(shares);

  if (params.partial_sums == 0) {
    return;
  }
  // One simdgroup after the other, so that the order of the sum is fixed.
  for (uint turn = 0; turn < simdgroups; ++turn) {
    if (simdgroup == turn) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int j = 0; j < pack_size<T>(); ++j) {
          const uint column = column_of<T>(map, i) + j;
          if (column < columns) {
            combined[column] = (turn == 0 ? 0.0f : combined[column]) + shares.weight[i][j];
            if (Centred) {
              const uint at = most_columns + column;
              combined[at] = (turn == 0 ? 0.0f : combined[at]) + shares.bias[i][j];
            }
          }
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint column = t; column < columns; column += threads) {
    partials[size_t(group) * columns + column] = combined[column];
    if (Centred && params.partial_sums == 2) {
      partials[size_t(params.blocks + group) * columns + column] = combined[most_columns + column];
    }
  }
}

// Leaves a thread's shares at its columns of block `block`.
template <typename T, int N, bool Centred>
inline void write_shares(
    thread const Shares<T, N>& shares, ColumnMap map, uint block, constant NormVjpParams& params,
    device float* partials) {
  const size_t columns = params.row.columns;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (params.partial_sums > 0) {
      store_sums<T>(partials + block * columns, map, i, shares.weight[i]);
    }
    if (Centred && params.partial_sums == 2) {
      store_sums<T>(partials + (params.blocks + block) * columns, map, i, shares.bias[i]);
    }
  }
}

template <typename T, int N, bool Centred>
[[kernel, threads_at_most(N == 1 ? 256 : 512, 512)]] void norm_vjp_block(
    const device T* x [[buffer(0)]],        // [rows, columns]
    const device T* weight [[buffer(1)]],   // [columns]
    const device T* dy [[buffer(2)]],       // [rows, columns]
    const device T* dsum [[buffer(3)]],     // [rows, columns]
    device T* dx [[buffer(4)]],             // [rows, columns]
    device float* partials [[buffer(5)]],   // [2][blocks, columns]
    constant NormVjpParams& params [[buffer(6)]],
    uint block [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  // Every other row has its own scratch, so that one barrier a reduction is enough.
  threadgroup float mean_scratch[2][32];
  constexpr int sums = Centred ? 3 : 2;
  threadgroup float scratch[2][32 * sums];
  const ThreadPosition position = ThreadPosition{lane, simdgroup, simdgroups};
  const uint columns = params.row.columns;
  const ColumnMap map = ColumnMap{params.row.whole != 0, t, threads, 0, columns};

  ColumnPart<N> w;
  ColumnPart<N> x_part;
  ColumnPart<N> dy_part;
  ColumnPart<N> dsum_part;
  load_weight(weight, params.has_weight, map, w);
  Shares<T, N> shares;
  clear(shares);
  // The next row is on its way while a row's sums are taken, where there are registers for both.
  constexpr bool ahead = N == 1 || (N == 2 && (sizeof(T) == 4 || !Centred));
  ColumnPart<N> next_x;
  ColumnPart<N> next_dy;
  if (ahead) {
    load_part(x + size_t(block) * columns, map, next_x);
    load_part(dy + size_t(block) * columns, map, next_dy);
  }
  uint turn = 0;
  for (uint row = block; row < params.row.rows; row += params.blocks) {
    const size_t start = size_t(row) * columns;
    if (!ahead) {
      load_part(x + start, map, x_part);
      load_part(dy + start, map, dy_part);
    } else {
      x_part = next_x;
      dy_part = next_dy;
      if (row + params.blocks < params.row.rows) {
        const size_t next = start + size_t(params.blocks) * columns;
        load_part(x + next, map, next_x);
        load_part(dy + next, map, next_dy);
      }
    }
    constexpr bool early = N < 4;  // there are registers for it
    if (early) {
      load_dsum<Centred>(dsum + start, params.has_dsum, map, dsum_part);
    }
    float mean = 0;
    if (Centred) {
      mean = scaled_mean(threadgroup_sum(columns_sum<T>(x_part), mean_scratch[turn], position), float(columns));
    }
    const float3 own = part_sums<T, N, Centred>(x_part, dy_part, w, params.has_weight, mean, map);
    float row_sums[3] = {own.x, own.y, own.z};
    threadgroup_sums<sums>(row_sums, scratch[turn], position);
    const Coefficients c =
        row_coefficients<Centred>(mean, row_sums[0], row_sums[1], row_sums[2], columns, params.eps);
    if (!early) {
      load_dsum<Centred>(dsum + start, params.has_dsum, map, dsum_part);
    }
    write_row<T, N, Centred>(x_part, dy_part, w, dsum_part, dx + start, params, c, map, shares);
    turn = 1 - turn;
  }
  finish<Centred>(shares);
  write_shares<T, N, Centred>(shares, map, block, params, partials);
}

// The sums of part of a row: moments of x, sum of g, sum of g (x - the part's mean).
struct Statistics {
  Moments moments;
  float g;
  float products;
};

template <bool Centred>
inline Statistics merge(Statistics a, Statistics b) {
  Statistics s;
  if (Centred) {
    s.moments = merge(a.moments, b.moments);
    s.products = a.products + b.products + a.g * (a.moments.mean - s.moments.mean) +
        b.g * (b.moments.mean - s.moments.mean);
  } else {
    s.moments = Moments{0, 0, a.moments.m2 + b.moments.m2};
    s.products = a.products + b.products;
  }
  s.g = a.g + b.g;
  return s;
}

template <bool Centred>
inline Statistics simd_merge(Statistics s) {
#pragma unroll
  for (ushort mask = 16; mask > 0; mask /= 2) {
    Statistics other;
    other.moments.count = simd_shuffle_xor(s.moments.count, mask);
    other.moments.mean = simd_shuffle_xor(s.moments.mean, mask);
    other.moments.m2 = simd_shuffle_xor(s.moments.m2, mask);
    other.g = simd_shuffle_xor(s.g, mask);
    other.products = simd_shuffle_xor(s.products, mask);
    s = merge<Centred>(s, other);
  }
  return s;
}

template <typename P>
inline Statistics read_statistics(P p) {
  return Statistics{Moments{p[0], p[1], p[2]}, p[3], p[4]};
}

template <typename P>
inline void write_statistics(P p, Statistics s) {
  p[0] = s.moments.count;
  p[1] = s.moments.mean;
  p[2] = s.moments.m2;
  p[3] = s.g;
  p[4] = s.products;
}

template <typename T, int N, bool Centred>
[[kernel, max_total_threads_per_threadgroup(256)]] void norm_vjp_statistics(
    const device T* x [[buffer(0)]],          // [rows, columns]
    const device T* weight [[buffer(1)]],     // [columns]
    const device T* dy [[buffer(2)]],         // [rows, columns]
    device float* statistics [[buffer(3)]],   // [rows, splits, 5]
    constant NormVjpParams& params [[buffer(4)]],
    uint group [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float scratch[32 * 5];
  const uint columns = params.row.columns;
  const uint row = group / params.row.splits;
  const uint split_columns = params.row.packs_per_split * pack_size<T>();
  const uint begin = (group % params.row.splits) * split_columns;
  const uint end = min(begin + split_columns, columns);
  const size_t start = size_t(row) * columns;

  Statistics own = Statistics{Moments{0, 0, 0}, 0, 0};
  for (uint from = begin; from < end; from += N * threads * pack_size<T>()) {
    const ColumnMap map = ColumnMap{params.row.whole != 0, t, threads, from, end};
    ColumnPart<N> x_part;
    ColumnPart<N> dy_part;
    ColumnPart<N> w;
    load_part(x + start, map, x_part);
    load_part(dy + start, map, dy_part);
    load_weight(weight, params.has_weight, map, w);
    Statistics batch = Statistics{Moments{0, 0, 0}, 0, 0};
    if (Centred) {
      uint count = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) {
#pragma unroll
        for (int j = 0; j < pack_size<T>(); ++j) {
          count += column_of<T>(map, i) + j < end ? 1 : 0;
        }
      }
      batch.moments.count = float(count);
      batch.moments.mean = count > 0 ? scaled_mean(columns_sum<T>(x_part), float(count)) : 0.0f;
    }
    const float3 sums =
        part_sums<T, N, Centred>(x_part, dy_part, w, params.has_weight, batch.moments.mean, map);
    batch.moments.m2 = sums.x;
    batch.products = sums.y;
    batch.g = sums.z;
    own = merge<Centred>(own, batch);
  }
  own = simd_merge<Centred>(own);
  if (lane == 0) {
    write_statistics(scratch + 5 * simdgroup, own);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0) {
    Statistics all = Statistics{Moments{0, 0, 0}, 0, 0};
    if (lane < simdgroups) {
      all = read_statistics(scratch + 5 * lane);
    }
    all = simd_merge<Centred>(all);
    if (lane == 0) {
      write_statistics(statistics + 5 * size_t(group), all);
    }
  }
}

// One simdgroup a row.
template <bool Centred>
[[kernel, max_total_threads_per_threadgroup(256)]] void norm_vjp_coefficients(
    const device float* statistics [[buffer(0)]],  // [rows, splits, 5]
    device float4* coefficients [[buffer(1)]],     // [rows]: half_mean, n, slope, shift
    constant NormVjpParams& params [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint row = group * simdgroups + simdgroup;
  if (row >= params.row.rows) {
    return;
  }
  Statistics s = Statistics{Moments{0, 0, 0}, 0, 0};
  for (uint i = lane; i < params.row.splits; i += 32) {
    s = merge<Centred>(s, read_statistics(statistics + 5 * (size_t(row) * params.row.splits + i)));
  }
  s = simd_merge<Centred>(s);
  const Coefficients c = row_coefficients<Centred>(
      s.moments.mean, s.moments.m2, s.products, s.g, params.row.columns, params.eps);
  if (lane == 0) {
    coefficients[row] = float4(c.half_mean, c.n, c.slope, c.shift);
  }
}

// Threadgroups are numbered block by block; within a block each takes threads * N packs of columns.
template <typename T, int N, bool Centred>
[[kernel, max_total_threads_per_threadgroup(256)]] void norm_vjp_columns(
    const device T* x [[buffer(0)]],                   // [rows, columns]
    const device T* weight [[buffer(1)]],              // [columns]
    const device T* dy [[buffer(2)]],                  // [rows, columns]
    const device T* dsum [[buffer(3)]],                // [rows, columns]
    const device float4* coefficients [[buffer(4)]],   // [rows]
    device T* dx [[buffer(5)]],                        // [rows, columns]
    device float* partials [[buffer(6)]],              // [2][blocks, columns]
    constant NormVjpParams& params [[buffer(7)]],
    uint group [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  const uint columns = params.row.columns;
  const uint group_columns = threads * N * pack_size<T>();
  const uint groups = (columns + group_columns - 1) / group_columns;
  const uint block = group / groups;
  const uint begin = (group % groups) * group_columns;
  const uint end = min(begin + group_columns, columns);
  const ColumnMap map = ColumnMap{params.row.whole != 0, t, threads, begin, end};

  ColumnPart<N> w;
  ColumnPart<N> x_part;
  ColumnPart<N> dy_part;
  ColumnPart<N> dsum_part;
  load_weight(weight, params.has_weight, map, w);
  Shares<T, N> shares;
  clear(shares);
  for (uint row = block; row < params.row.rows; row += params.blocks) {
    const size_t start = size_t(row) * columns;
    load_part(x + start, map, x_part);
    load_part(dy + start, map, dy_part);
    load_dsum<Centred>(dsum + start, params.has_dsum, map, dsum_part);
    const float4 c = coefficients[row];
    write_row<T, N, Centred>(
        x_part, dy_part, w, dsum_part, dx + start, params, Coefficients{c.x, c.y, c.z, c.w}, map, shares);
  }
  finish<Centred>(shares);
  write_shares<T, N, Centred>(shares, map, block, params, partials);
}

// dweight = sum over blocks of partials[0], dbias of partials[1]: 32 columns a threadgroup, each simdgroup takes every
// S-th block. Threadgroups are numbered output by output, from `first` on.
template <typename T, int S>
[[kernel, max_total_threads_per_threadgroup(32 * S)]] void norm_vjp_column_sum(
    const device float* partials [[buffer(0)]],  // [2][blocks, columns]
    device T* dweight [[buffer(1)]],             // [columns]
    device T* dbias [[buffer(2)]],               // [columns]
    constant ColumnSumParams& params [[buffer(3)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
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
      total += scratch[s][lane];
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
instantiate_types("rms_norm_vjp_statistics", norm_vjp_statistics, 2, false)
instantiate_kernel("rms_norm_vjp_coefficients", norm_vjp_coefficients, false)
instantiate_types("rms_norm_vjp_columns", norm_vjp_columns, 1, false)
instantiate_types("layer_norm_vjp_simd1", norm_vjp_simd, 1, true)
instantiate_types("layer_norm_vjp_simd2", norm_vjp_simd, 2, true)
instantiate_types("layer_norm_vjp_block1", norm_vjp_block, 1, true)
instantiate_types("layer_norm_vjp_block2", norm_vjp_block, 2, true)
instantiate_kernel("layer_norm_vjp_block4_float32", norm_vjp_block, float, 4, true)
instantiate_types("layer_norm_vjp_statistics", norm_vjp_statistics, 2, true)
instantiate_kernel("layer_norm_vjp_coefficients", norm_vjp_coefficients, true)
instantiate_types("layer_norm_vjp_columns", norm_vjp_columns, 1, true)
instantiate_types("norm_vjp_column_sum", norm_vjp_column_sum, 16)
