// The schedule of products of M rows of x with rows of weights:  sum_k x[m, k] * w[n, k].
//
// A simdgroup has R outputs of each of N sources. Its lanes share out the columns, a run of neighbours each at a time,
// and so do several simdgroups of a threadgroup where there are few outputs. A lane keeps its sums in registers until
// it is through with its columns; lanes beyond the last column stop early. Then a simdgroup adds up its lanes' sums,
// and the threadgroup its simdgroups'.
//
// A source says where rows of weights lie (mittens/source):
//   Run load(row, more, column)  Values::size columns of row + more from `column` on, a multiple. All lanes have the same
//                           `more`: one multiplication serves several rows of a lane
//   at(row, alone)          the same rows from another one on
//   scale(run), bias(run)   w[i] = scale * v[i] + bias; has_bias: whether there is one
//   fits_half               whether halves have the range of scales and weights
// and its Values, the weights of a run:
//   unpack(run.words, q)    q[i] = base + factor(level(i)) * v[i] as halves
//   levels                  0 .. levels - 1
//   middle                  the v that stands for zero, or about so in sources that have a bias
//   headroom                factor of sums of x: 1, or small enough that with it and `factor` no sum overflows
#pragma once

#include <metal_stdlib>

#include "matmul/activation.h"
#include "mittens/simd_reduce_scatter.h"
#include "params/matmul.h"

using namespace metal;

namespace mittens {

// Elements of x in registers: halves stay halves, which products take as they are.
template <typename T>
struct ActivationOf {
  using type = float;
};
template <>
struct ActivationOf<half> {
  using type = half;
};

// Rows of x from the first of a threadgroup on; rows past the last repeat it.
template <typename T>
struct RowsOfX {
  using Type = T;     // of products
  using Element = T;  // of the row in memory
  using Activation = typename ActivationOf<Element>::type;
  const device T* x;  // 16-byte aligned
  uint columns;       // whole runs, from row to row too
  uint rows;
  uint first = 0;  // where they begin

  // Computes the offset of row m from the row before: keeping an offset of each row would take a register.
  uint offset(int m, uint column, uint before) const {
    return m == 0 ? first + column : min(before + columns, first + column + (rows - 1) * columns);
  }
};

// q of the middle.
template <typename Values>
constexpr float origin_of(int level) {
  return Values::base + Values::factor(level) * Values::middle;
}

// A lane's columns of a row of x; their sum, and the start of sums of products of a level.
template <typename Activation, typename Values>
struct RunOfX {
  Activation x[Values::size];
  float sum;
  float start[Values::levels];
};

template <typename T, int E>
inline void load_run(const device T* p, thread typename ActivationOf<T>::type (&x)[E]) {
  constexpr int W = 16 / sizeof(T);
  static_assert(E % W == 0, "a run of x is whole packs");
#pragma unroll
  for (int i = 0; i < E / W; ++i) {
    const uint4 bits = ((const device uint4*)p)[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (is_same_v<T, float>) {
        x[i * W + j] = as_type<float>(bits[j]);
      } else if constexpr (is_same_v<T, half>) {
        const half2 pair = as_type<half2>(bits[j]);
        x[i * W + 2 * j] = pair.x;
        x[i * W + 2 * j + 1] = pair.y;
      } else {
        x[i * W + 2 * j] = as_type<float>(bits[j] << 16);
        x[i * W + 2 * j + 1] = as_type<float>(bits[j] & 0xffff0000u);
      }
    }
  }
}

template <typename Values, typename Element>
inline void load_x(const device Element* from, thread RunOfX<typename ActivationOf<Element>::type, Values>& run) {
  load_run<Element>(from, run.x);
  float sums[Values::levels];
#pragma unroll
  for (int level = 0; level < Values::levels; ++level) {
    sums[level] = 0;
  }
#pragma unroll
  for (int i = 0; i < Values::size; ++i) {
    thread float& sum = sums[Values::level(i)];
    sum = fma(float(run.x[i]), Values::headroom, sum);
  }
  run.sum = 0;
#pragma unroll
  for (int level = 0; level < Values::levels; ++level) {
    const float origin = origin_of<Values>(level);
    run.start[level] = origin == 0.0f ? 0.0f : -origin / Values::headroom * sums[level];
    run.sum += sums[level];
  }
}

// Weight i of a run, from its unpacked q: a multiply-add, so that it is rounded once.
template <typename Source>
inline float run_weight(typename Source::Run run, half q, int i) {
  using Values = typename Source::Values;
  const float unit = 1 / Values::factor(Values::level(i));
  if constexpr (Source::has_bias) {
    return fma(float(q) - Values::base, Source::scale(run) * unit, Source::bias(run));
  } else {
    return (float(q) - origin_of<Values>(Values::level(i))) * unit * Source::scale(run);
  }
}

// totals[i * M + m] += x[m] * w[i] over the columns of a run, in float32: there the weights themselves are multiplied,
// since the rounding of two large sums that cancel would show.
template <typename Source, int C, int M, typename X>
inline void add_weights(
    thread const X& x, uint column, thread const typename Source::Run (&runs)[C], thread float (&totals)[C * M]) {
  using Values = typename Source::Values;
  constexpr int E = M > 2 ? 4 : Values::size;  // columns whose elements of x registers hold
#pragma unroll
  for (int part = 0; part < Values::size; part += E) {
    float rows[M][E];
    uint of_row = 0;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      of_row = x.offset(m, column + part, of_row);
      load_run<typename X::Element>(x.x + of_row, rows[m]);
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
      half q[Values::size];
      Values::unpack(runs[c].words, q);
#pragma unroll
      for (int i = 0; i < E; ++i) {
        const float w = run_weight<Source>(runs[c], q[part + i], part + i);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          totals[c * M + m] = fma(w, rows[m][i], totals[c * M + m]);
        }
      }
    }
  }
}

// total += x * w over the columns of a run, from its unpacked q.
template <typename Source, typename Activation>
inline void add_products(
    thread const RunOfX<Activation, typename Source::Values>& x, typename Source::Run run,
    thread const half (&q)[Source::Values::size], thread float& total) {
  using Values = typename Source::Values;
  constexpr bool small = Values::headroom != 1.0f;
  const float plain = Source::scale(run);
  const float scale = small ? plain * (1 / Values::factor(0)) : plain;
  const float bias = Source::has_bias ? fma(Values::middle, plain, Source::bias(run)) * (1 / Values::headroom) : 0.0f;
  float sums[Values::levels];
#pragma unroll
  for (int level = 0; level < Values::levels; ++level) {
    sums[level] = x.start[level];
  }
#pragma unroll
  for (int i = 0; i < Values::size; ++i) {
    thread float& sum = sums[Values::level(i)];
    sum = fma(float(q[i]), float(x.x[i]), sum);
  }
  if constexpr (Values::factor(0) != 1.0f && !small) {
    sums[0] *= 1 / Values::factor(0);
  }
#pragma unroll
  for (int level = 1; level < Values::levels; ++level) {
    sums[0] = fma(sums[level], 1 / Values::factor(level), sums[0]);
  }
  if constexpr (Source::has_bias) {
    total = fma(bias, x.sum, total);
  }
  total = fma(scale, sums[0], total);
}

// The outputs of a simdgroup: R from `first` on; those before `own` are another's. Where there are fewer than R outputs
// in all, it has one.
struct OwnOutputs {
  uint first;
  uint own;
  bool alone;
};

template <int R>
inline OwnOutputs outputs_of(uint outputs, uint block) {
  const bool alone = outputs < R;
  const uint own = block * (alone ? 1 : R);
  return {min(own, outputs - (alone ? 1 : R)), own, alone};
}

// Where a simdgroup stands in its threadgroup: `sharers` of them share the columns of the same outputs.
struct Sharing {
  uint position;  // among the sharers' threads
  uint sharers;
  uint block;  // of outputs, in the threadgroup
  uint lane;
};

// totals[(s * R + r) * M + m] = x[m] * row r of source s, over the lane's columns.
template <int N, int R, int M, typename X, typename Source>
inline void dot_rows(thread const X& x, thread const Source (&w)[N], Sharing at, thread float (&totals)[N * R * M]) {
  using T = typename X::Type;
  using Values = typename Source::Values;
#pragma unroll
  for (int i = 0; i < N * R * M; ++i) {
    totals[i] = 0;
  }
  for (uint column = at.position * Values::size; column < x.columns; column += at.sharers * (32 * Values::size)) {
    typename Source::Run runs[N * R];
#pragma unroll
    for (int i = 0; i < N * R; ++i) {
      runs[i] = w[i / R].load(0, i % R, column);
    }
    if constexpr (is_same_v<T, float>) {
      add_weights<Source, N * R, M>(x, column, runs, totals);
    } else {
      half q[N * R][Values::size];
#pragma unroll
      for (int i = 0; i < N * R; ++i) {
        Values::unpack(runs[i].words, q[i]);
      }
      uint of_row = 0;
#pragma unroll
      for (int m = 0; m < M; ++m) {
        of_row = x.offset(m, column, of_row);
        RunOfX<typename X::Activation, Values> run;
        load_x<Values>(x.x + of_row, run);
#pragma unroll
        for (int i = 0; i < N * R; ++i) {
          add_products<Source>(run, runs[i], q[i], totals[i * M + m]);
        }
      }
    }
  }
}

// Sum i of C over the lanes of all sharers, in the lanes [i * (32 / C), (i + 1) * (32 / C)). All threads of the
// threadgroup take part. partials: C floats for each simdgroup.
template <int C>
inline float sum_of_sharers(thread float (&totals)[C], Sharing at, threadgroup float* partials) {
  static_assert(C <= 32, "a sum for each lane at most");
  simd_reduce_scatter(totals, at.lane);
  if (at.sharers == 1) {
    return totals[0];
  }
  const uint i = at.lane / (32 / C);
  threadgroup float* of_block = partials + at.block * at.sharers * C;
  if (at.lane % (32 / C) == 0) {
    of_block[at.position / 32 * C + i] = totals[0];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0;
  for (uint s = 0; s < at.sharers; ++s) {
    sum += of_block[s * C + i];
  }
  return sum;
}

// Whether a lane holds a sum of an output that sum_of_sharers made, and this is for its simdgroup to write.
template <int C>
inline bool writes(Sharing at, OwnOutputs outputs, uint output) {
  return at.position < 32 && at.lane % (32 / C) == 0 && output >= outputs.own &&
         (!outputs.alone || output == outputs.first);
}

// The result from the sums of N sources: sum + bias of one, gate and up of two, rounded once.
template <typename T, int N, typename Params>
inline T epilogue(thread const float (&sums)[N], const device T* bias, constant Params& params, uint output) {
  if constexpr (N == 2) {
    return T(activate(sums[0], params.gate_alpha, params.gate_beta) * sums[1]);
  } else {
    return T(params.has_bias ? sums[0] + float(bias[output]) : sums[0]);
  }
}

// Writes the products of M rows of x with the outputs of a simdgroup, which has block number `block` of them. y: from
// row first_row on.
template <int M, int R, typename T, typename Source, int N, typename Params>
inline void multiply_by_rows(
    RowsOfX<T> rows, thread const Source (&w)[N], const device T* bias, device T* y, size_t first_row, uint block,
    constant Params& params, Sharing at, threadgroup float* partials) {
  constexpr int C = N * R * M;
  const OwnOutputs outputs = outputs_of<R>(params.outputs, block);
  Source own[N];
#pragma unroll
  for (int s = 0; s < N; ++s) {
    own[s] = w[s].at(outputs.first, outputs.alone);
  }
  float totals[C];
  dot_rows<N, R, M>(rows, own, at, totals);
  float sums[N] = {sum_of_sharers(totals, at, partials)};
  if constexpr (N == 2) {
    sums[1] = simd_shuffle_xor(sums[0], ushort(16));  // the upper half of the lanes has the second's
  }
  const uint output = outputs.first + at.lane / (32 / N / R);
  const uint m = at.lane / (32 / C) % M;
  if (writes<C>(at, outputs, output) && (N == 1 || at.lane < 16) && m < rows.rows) {
    y[(first_row + m) * params.outputs + output] = epilogue(sums, bias, params, output);
  }
}

}  // namespace mittens
