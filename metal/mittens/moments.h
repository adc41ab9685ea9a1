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

// Of the L lanes that share a row, whose counts add up to `count`, at once. What differs from the first lane's mean is
// averaged, so that a mean far from zero costs no digits.
template <int L>
inline Moments lanes_merge(Moments m, float count, uint lane) {
  const float origin = simd_shuffle(m.mean, ushort(lane & ~(L - 1)));
  Moments all;
  all.count = count;
  all.mean = origin + lanes_sum<L>(m.count * (m.mean - origin)) / max(count, 1.0f);
  const float difference = m.mean - all.mean;
  all.deviation = lanes_sum<L>(fma(m.count * difference, difference, m.deviation));
  return all;
}

inline Moments simd_merge(Moments m) {
  return lanes_merge<32>(m, simd_sum(m.count), 0);
}

// Of what each simdgroup has in all of its lanes. One barrier; scratch[96].
inline Moments simdgroups_merge(Moments m, threadgroup float* scratch, Place place) {
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

// Moments of the packs below end, and of the edge element if this thread has one. They are taken in one pass, so that
// no unpacked value is held, from the mean of the first pack: it is among them, so that what is taken off the squares
// in the end is at most N times what is left, however far the mean is from zero.
template <typename T, int N>
inline Moments part_moments(thread const RowPart<T, N>& part, bool has_edge, uint first, uint stride, uint end) {
  float origin = 0;
  if (first < end) {
    float v[16 / sizeof(T)];
    unpack<T>(part.packs[0], v);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      origin += v[j];
    }
    origin /= pack_size<T>();
  } else if (has_edge) {
    origin = float(part.edge);
  }
  uint count = has_edge ? 1 : 0;
  float sum = has_edge ? float(part.edge) - origin : 0.0f;
  float squares = sum * sum;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (first + i * stride < end) {
      float v[16 / sizeof(T)];
      unpack<T>(part.packs[i], v);
#pragma unroll
      for (int j = 0; j < pack_size<T>(); ++j) {
        const float difference = v[j] - origin;
        sum += difference;
        squares = fma(difference, difference, squares);
      }
      count += pack_size<T>();
    }
  }
  const float shift = sum / float(max(count, 1u));
  return Moments{float(count), origin + shift, max(squares - sum * shift, 0.0f)};
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
    own = merge(own, part_moments(part, has_edge, first, threads, end));
    has_edge = false;
  }
  return own;
}

}  // namespace mittens
