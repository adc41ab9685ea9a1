// Count, mean and sum of squared deviations of a set of values; two such merge without cancellation (Chan, Golub and
// LeVeque 1979). For rows that do not stay in registers.
#pragma once

#include "mittens/reduce.h"
#include "mittens/row.h"

namespace mittens {

struct Moments {
  float count;
  float mean;
  float deviation;  // sum of (x - mean)^2
};

inline Moments merge(Moments a, Moments b) {
  const float count = a.count + b.count;
  const float inverse = count > 0 ? 1.0f / count : 0.0f;
  const float difference = b.mean - a.mean;
  Moments result;
  result.count = count;
  result.mean = (a.mean * a.count + b.mean * b.count) * inverse;
  result.deviation = a.deviation + b.deviation + difference * difference * (a.count * b.count * inverse);
  return result;
}

inline Moments simd_merge(Moments m) {
#pragma unroll
  for (ushort mask = 16; mask > 0; mask /= 2) {
    Moments other;
    other.count = simd_shuffle_xor(m.count, mask);
    other.mean = simd_shuffle_xor(m.mean, mask);
    other.deviation = simd_shuffle_xor(m.deviation, mask);
    m = merge(m, other);
  }
  return m;
}

// One barrier; scratch[96].
inline Moments threadgroup_merge(Moments m, threadgroup float* scratch, Place place) {
  m = simd_merge(m);
  if (place.lane == 0) {
    scratch[place.simdgroup] = m.count;
    scratch[32 + place.simdgroup] = m.mean;
    scratch[64 + place.simdgroup] = m.deviation;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Moments other = Moments{0, 0, 0};
  if (place.lane < place.simdgroups) {
    other = Moments{scratch[place.lane], scratch[32 + place.lane], scratch[64 + place.lane]};
  }
  return simd_merge(other);
}

// Sum of the packs first, first + stride, ... and of the edge element; what lies outside the row holds zeros.
template <typename T, int N>
inline float part_sum(thread const RowPart<T, N>& part) {
  float sum = float(part.edge);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float v[16 / sizeof(T)];
    unpack<T>(part.packs[i], v);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      sum += v[j];
    }
  }
  return sum;
}

// Sum of (x - mean)^2 over the packs below end, and over the edge element if this thread has one.
template <typename T, int N>
inline float part_deviation(
    thread const RowPart<T, N>& part, float mean, bool has_edge, uint first, uint stride, uint end) {
  const float from_mean = float(part.edge) - mean;
  float sum = has_edge ? from_mean * from_mean : 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (first + i * stride < end) {
      float v[16 / sizeof(T)];
      unpack<T>(part.packs[i], v);
#pragma unroll
      for (int j = 0; j < pack_size<T>(); ++j) {
        sum += (v[j] - mean) * (v[j] - mean);
      }
    }
  }
  return sum;
}

// Moments of the packs begin .. end, and of this thread's edge element if the caller takes the edges.
template <typename T, int N>
inline Moments range_moments(
    const device T* x_row, RowSpan span, uint begin, uint end, bool edges, uint t, uint threads) {
  RowPart<T, N> part;
  bool has_edge = edges && t < span.edges;
  part.edge = has_edge ? load_edge(x_row, span, t, 0) : T(0);
  Moments own = Moments{0, 0, 0};
  // The edge element goes in with the first batch, which may hold no pack.
  for (uint first = begin + t; first == begin + t || first < end; first += N * threads) {
    load_packs(x_row, span, true, first, threads, end, uint4(0), part);
    const uint packs = first < end ? min((end - first + threads - 1) / threads, uint(N)) : 0;
    Moments batch;
    batch.count = float(packs * pack_size<T>() + (has_edge ? 1 : 0));
    batch.mean = batch.count > 0 ? part_sum(part) / batch.count : 0.0f;
    batch.deviation = part_deviation(part, batch.mean, has_edge, first, threads, end);
    own = merge(own, batch);
    has_edge = false;
    part.edge = T(0);
  }
  return own;
}

}  // namespace mittens
