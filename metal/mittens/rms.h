// The mathematics that rms_norm and add_rms_norm share, on what one thread holds of a row.
#pragma once

#include "mittens/row_io.h"

namespace mittens {

// Sum of squares; packs and edges outside the row hold zeros.
template <typename T, int N>
inline float square_sum(thread const RowPart<T, N>& part) {
  float sum = float(part.edge) * float(part.edge);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float v[16 / sizeof(T)];
    unpack<T>(part.packs[i], v);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      sum += v[j] * v[j];
    }
  }
  return sum;
}

inline float rstd(float square_sum, uint columns, float eps) {
  return precise::rsqrt(square_sum / float(columns) + eps);
}

// x * rstd is rounded to T before the weight is applied, as mx does.
template <typename T>
inline uint4 normalize_pack(uint4 x, float rstd, bool has_weight, uint4 weight) {
  float v[16 / sizeof(T)];
  unpack<T>(x, v);
#pragma unroll
  for (int j = 0; j < pack_size<T>(); ++j) {
    v[j] *= rstd;
  }
  if (has_weight) {
    float w[16 / sizeof(T)];
    unpack<T>(weight, w);
    round_values<T>(v);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      v[j] *= w[j];
    }
  }
  return pack<T>(v);
}

template <typename T>
inline float normalize_edge(T x, float rstd, bool has_weight, T weight) {
  const float v = float(x) * rstd;
  return has_weight ? round_to<T>(v) * float(weight) : v;
}

// How many packs of the weight are on their way while a thread of N packs waits for its row's sum, and after that.
template <int N>
constexpr int weights_ahead() {
  return N < 2 ? N : 2;
}

// The weight, [columns], of a thread's first packs of a row; zeros where there is none.
template <typename T, int N>
struct WeightAhead {
  uint4 packs[weights_ahead<N>()];
  T edge;
};

// The pack p of the weight, or zeros.
template <typename T>
inline uint4 load_weight(const device T* weight, bool has_weight, bool aligned, RowSpan span, uint p, uint end) {
  return has_weight && p < end ? load_pack(weight + span.head + p * pack_size<T>(), aligned) : uint4(0);
}

template <typename T, int N>
inline void load_weights(
    const device T* weight, bool has_weight, bool aligned, RowSpan span, uint t, uint first, uint stride, uint end,
    thread WeightAhead<T, N>& ahead) {
#pragma unroll
  for (int i = 0; i < weights_ahead<N>(); ++i) {
    ahead.packs[i] = load_weight(weight, has_weight, aligned, span, first + i * stride, end);
  }
  ahead.edge = has_weight ? load_edge(weight, span, t, 0) : T(0);
}

// Writes the packs of y for those of x in part, which it uses up: a loop whose packs move up keeps them packed until
// their turn comes.
template <typename T, int N>
inline void write_part(
    thread RowPart<T, N>& part, thread WeightAhead<T, N>& ahead, float rstd, const device T* weight,
    bool has_weight, bool weight_aligned, device T* y_row, bool y_aligned, RowSpan span, uint first, uint stride,
    uint end) {
  constexpr int A = weights_ahead<N>();
#pragma unroll 1
  for (int i = 0; i < N; ++i) {
    const uint p = first + i * stride;
    if (p >= end) {
      break;
    }
    const uint4 w = ahead.packs[0];
#pragma unroll
    for (int k = 1; k < A; ++k) {
      ahead.packs[k - 1] = ahead.packs[k];
    }
    if (N > A) {
      ahead.packs[A - 1] = load_weight(weight, has_weight, weight_aligned, span, p + A * stride, end);
    }
    store_pack(
        y_row + span.head + p * pack_size<T>(), y_aligned,
        normalize_pack<T>(part.packs[0], rstd, has_weight, w));
#pragma unroll
    for (int k = 1; k < N; ++k) {
      part.packs[k - 1] = part.packs[k];
    }
  }
}

// Writes y over the packs begin .. end, and this thread's edge element if the caller takes the edges, of a row that
// does not stay in registers. x_row and y_row are to its start.
template <typename T, int N, typename Params>
inline void range_normalize(
    const device T* x_row, bool x_aligned, const device T* weight, device T* y_row, bool y_aligned,
    constant Params& params, RowSpan span, uint begin, uint end, bool edges, float rstd, uint t, uint threads) {
  const bool weight_aligned = packs_aligned<T>(params.weight_phase, span);
  RowPart<T, N> part;
  WeightAhead<T, N> ahead;
  for (uint first = begin + t; first < end; first += N * threads) {
    load_packs(x_row, span, x_aligned, first, threads, end, uint4(0), part);
    load_weights(weight, params.has_weight, weight_aligned, span, t, first, threads, end, ahead);
    write_part(
        part, ahead, rstd, weight, params.has_weight, weight_aligned, y_row, y_aligned, span, first, threads,
        end);
  }
  if (edges) {
    const T w = params.has_weight ? load_edge(weight, span, t, 0) : T(0);
    const T x = load_edge(x_row, span, t, 0);
    store_edge(y_row, span, t, normalize_edge<T>(x, rstd, params.has_weight, w));
  }
}

}  // namespace mittens
