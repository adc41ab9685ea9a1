// The mathematics of softmax, on what one thread holds of a row.
#pragma once

#include "mittens/reduce.h"
#include "mittens/row_io.h"

namespace mittens {

// exp(v) of a difference v <= 0, good enough for results in T. For float the rounding of v * log2(e), which grows with
// |v|, is put right to first order.
template <typename T>
inline float exp_of(float v) {
  const float scaled = v * M_LOG2E_F;
  const float power = fast::exp2(scaled);
  if constexpr (is_same_v<T, float>) {
    constexpr float log2e_rest = 1.92596303e-8f;  // log2(e) - M_LOG2E_F
    const float lost = scaled > -200.0f ? fma(v, M_LOG2E_F, -scaled) + v * log2e_rest : 0.0f;
    return fma(power, lost * M_LN2_F, power);
  }
  return power;
}

// A maximum and the sum of exp(x - maximum). Nothing seen yet is {-inf, 0}.
struct MaxSum {
  float maximum;
  float sum;
};

// What to subtract before exp where only -inf has been seen so far: -inf - -inf would be NaN.
inline float finite_base(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

template <typename T>
inline MaxSum merge(MaxSum a, MaxSum b) {
  const float maximum = max(a.maximum, b.maximum);
  const float base = finite_base(maximum);
  return MaxSum{maximum, a.sum * exp_of<T>(a.maximum - base) + b.sum * exp_of<T>(b.maximum - base)};
}

template <typename T>
inline MaxSum simd_merge(MaxSum own) {
  const float maximum = simd_max(own.maximum);
  return MaxSum{maximum, simd_sum(own.sum * exp_of<T>(own.maximum - finite_base(maximum)))};
}

// Merges what the simdgroups hold, with one barrier; scratch[64].
template <typename T>
inline MaxSum threadgroup_merge(MaxSum own, threadgroup float* scratch, Place place) {
  if (place.lane == 0) {
    scratch[place.simdgroup] = own.maximum;
    scratch[32 + place.simdgroup] = own.sum;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  MaxSum other = MaxSum{-INFINITY, 0};
  if (place.lane < place.simdgroups) {
    other = MaxSum{scratch[place.lane], scratch[32 + place.lane]};
  }
  return simd_merge<T>(other);
}

template <typename T, int N>
struct Exponentials {
  float values[N][16 / sizeof(T)];
  float edge;
};

template <typename T, int N>
inline float maximum(thread const RowPart<T, N>& part) {
  float result = float(part.edge);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float v[16 / sizeof(T)];
    unpack<T>(part.packs[i], v);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      result = max(result, v[j]);
    }
  }
  return result;
}

// e = exp(part - base), and their sum.
template <typename T, int N>
inline float exponentials(thread const RowPart<T, N>& part, float base, thread Exponentials<T, N>& e) {
  e.edge = exp_of<T>(float(part.edge) - base);
  float sum = e.edge;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    unpack<T>(part.packs[i], e.values[i]);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      e.values[i][j] = exp_of<T>(e.values[i][j] - base);
      sum += e.values[i][j];
    }
  }
  return sum;
}

// part = T(e * factor).
template <typename T, int N>
inline void scale(thread Exponentials<T, N>& e, float factor, thread RowPart<T, N>& part) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      e.values[i][j] *= factor;
    }
    part.packs[i] = pack<T>(e.values[i]);
  }
  part.edge = T(e.edge * factor);
}

// Maximum and sum of the packs begin .. end, and of this thread's edge element if the caller takes the edges: the sum
// is rescaled when a batch of packs raises the maximum.
template <typename T, int N>
inline MaxSum range_max_sum(
    const device T* x_row, RowSpan span, uint begin, uint end, bool edges, uint t, uint threads) {
  RowPart<T, N> part;
  Exponentials<T, N> e;
  part.edge = edges ? load_edge(x_row, span, t, -INFINITY) : T(-INFINITY);
  MaxSum own = MaxSum{-INFINITY, 0};
  // The edge element goes in with the first batch, which may hold no pack.
  for (uint first = begin + t; first == begin + t || first < end; first += N * threads) {
    load_packs(x_row, span, true, first, threads, end, pack_of<T>(-INFINITY), part);
    const float raised = max(own.maximum, maximum(part));
    const float base = finite_base(raised);
    own.sum = own.sum * exp_of<T>(own.maximum - base) + exponentials(part, base, e);
    own.maximum = raised;
    part.edge = T(-INFINITY);
  }
  return own;
}

// Writes y over the packs begin .. end and the edges if the caller takes them. part holds the first batch of packs,
// which its caller loads before it waits for `all`.
template <typename T, int N>
inline void range_softmax(
    thread RowPart<T, N>& part, const device T* x_row, device T* y_row, bool y_aligned, RowSpan span, uint begin,
    uint end, bool edges, MaxSum all, uint t, uint threads) {
  const float inverse_sum = 1.0f / all.sum;
  Exponentials<T, N> e;
  part.edge = T(0);
  for (uint first = begin + t; first < end; first += N * threads) {
    exponentials(part, all.maximum, e);
    scale(e, inverse_sum, part);
    store_packs(y_row, span, y_aligned, first, threads, end, part);
    load_packs(x_row, span, true, first + N * threads, threads, end, uint4(0), part);
  }
  if (edges) {
    store_edge(y_row, span, t, exp_of<T>(float(load_edge(x_row, span, t, 0)) - all.maximum) * inverse_sum);
  }
}

}  // namespace mittens
