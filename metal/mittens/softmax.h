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

// The online softmax of what has been seen of a row, or of several rows: the maximum m, and l, the sum of exp(x - m).
// Nothing seen yet is {-inf, 0}.
template <typename V>
struct SoftmaxState {
  V m;
  V l;
};

// What to subtract before exp. Where only -inf has been seen it is not the maximum: -inf - -inf would be NaN.
inline float finite_maximum(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

inline float2 finite_maximum(float2 maximum) {
  return float2(finite_maximum(maximum.x), finite_maximum(maximum.y));
}

template <typename T>
inline SoftmaxState<float> merge(SoftmaxState<float> a, SoftmaxState<float> b) {
  const float maximum = max(a.m, b.m);
  const float base = finite_maximum(maximum);
  return SoftmaxState<float>{maximum, a.l * exp_of<T>(a.m - base) + b.l * exp_of<T>(b.m - base)};
}

template <typename T>
inline SoftmaxState<float> simd_merge(SoftmaxState<float> own) {
  const float maximum = simd_max(own.m);
  return SoftmaxState<float>{maximum, simd_sum(own.l * exp_of<T>(own.m - finite_maximum(maximum)))};
}

// Merges what the simdgroups hold, with one barrier; scratch[64].
template <typename T>
inline SoftmaxState<float> threadgroup_merge(
    SoftmaxState<float> own, threadgroup float* scratch, ThreadPosition position) {
  if (position.lane == 0) {
    scratch[position.simdgroup] = own.m;
    scratch[32 + position.simdgroup] = own.l;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  SoftmaxState<float> other = SoftmaxState<float>{-INFINITY, 0};
  if (position.lane < position.simdgroups) {
    other = SoftmaxState<float>{scratch[position.lane], scratch[32 + position.lane]};
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

// The state of the packs begin .. end, and of this thread's edge element if the caller takes the edges: the sum
// is rescaled when a batch of packs raises the maximum.
template <typename T, int N>
inline SoftmaxState<float> range_softmax_state(
    const device T* x_row, RowSpan span, uint begin, uint end, bool edges, uint t, uint threads) {
  RowPart<T, N> part;
  Exponentials<T, N> e;
  part.edge = edges ? load_edge(x_row, span, t, -INFINITY) : T(-INFINITY);
  SoftmaxState<float> own = SoftmaxState<float>{-INFINITY, 0};
  // The edge element goes in with the first batch, which may hold no pack.
  for (uint first = begin + t; first == begin + t || first < end; first += N * threads) {
    load_packs(x_row, span, true, first, threads, end, pack_of<T>(-INFINITY), part);
    const float raised = max(own.m, maximum(part));
    const float base = finite_maximum(raised);
    own.l = own.l * exp_of<T>(own.m - base) + exponentials(part, base, e);
    own.m = raised;
    part.edge = T(-INFINITY);
  }
  return own;
}

// Writes y over the packs begin .. end and the edges if the caller takes them. part holds the first batch of packs,
// which its caller loads before it waits for `all`.
template <typename T, int N>
inline void range_softmax(
    thread RowPart<T, N>& part, const device T* x_row, device T* y_row, bool y_aligned, RowSpan span, uint begin,
    uint end, bool edges, SoftmaxState<float> all, uint t, uint threads) {
  const float inverse_sum = 1.0f / all.l;
  Exponentials<T, N> e;
  part.edge = T(0);
  for (uint first = begin + t; first < end; first += N * threads) {
    exponentials(part, all.m, e);
    scale(e, inverse_sum, part);
    store_packs(y_row, span, y_aligned, first, threads, end, part);
    load_packs(x_row, span, true, first + N * threads, threads, end, uint4(0), part);
  }
  if (edges) {
    store_edge(y_row, span, t, exp_of<T>(float(load_edge(x_row, span, t, 0)) - all.m) * inverse_sum);
  }
}

}  // namespace mittens
