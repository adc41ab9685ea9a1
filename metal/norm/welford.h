// Count, mean and sum of squared deviations of a set of values; two such merge without cancellation (Chan, Golub and
// LeVeque 1979). For rows that do not stay in registers.
//
// The mean of finite values is finite whatever their size, and an m2 past the range of float32 is infinite and
// never NaN: sums that could overflow on the way are taken of values scaled by a power of two, in a multiply-add where
// an addition would be.
#pragma once

#include "mittens/reduce.h"
#include "mittens/row_io.h"

namespace mittens {

struct Moments {
  float count;
  float mean;
  float m2;  // sum of (x - mean)^2
};

// So many values have a scaled sum in range.
constant constexpr int most_summed = 1 << 14;

// sum + v / most_summed
inline float add_scaled(float sum, float v) {
  return fma(v, 1.0f / float(most_summed), sum);
}

// The mean of `count` values from their scaled sum.
inline float scaled_mean(float sum, float count) {
  return sum / (count * (1.0f / float(most_summed)));
}

// Half of x - mean, which itself may be past the range of float32. Halves are exact: what is made of them is doubled by
// what it is multiplied with.
inline float half_centred(float x, float half_mean) {
  return fma(x, 0.5f, -half_mean);
}

inline Moments merge(Moments a, Moments b) {
  const float count = a.count + b.count;
  const float inverse = count > 0 ? 1.0f / count : 0.0f;
  const float difference = b.mean - a.mean;
  const float share = b.count * inverse;
  Moments result;
  result.count = count;
  result.mean = fma(a.mean, a.count * inverse, b.mean * share);
  // The count comes first: 0 times the square of a large difference would be NaN.
  result.m2 = a.m2 + b.m2 + a.count * share * difference * difference;
  return result;
}

// Of the L lanes that share a row, whose counts add up to `count`, at once. What differs from the first lane's mean is
// averaged, so that a mean far from zero costs no digits.
template <int L>
inline Moments lanes_merge(Moments m, float count, uint lane) {
  constexpr float scale = 1.0f / 8589934592.0f;  // 2^-33: no count times it reaches 1
  const float half_origin = 0.5f * simd_shuffle(m.mean, ushort(lane & ~(L - 1)));
  const float sum = lanes_sum<L>(m.count * scale * fma(0.5f, m.mean, -half_origin));
  Moments all;
  all.count = count;
  all.mean = 2.0f * (half_origin + sum / (max(count, 1.0f) * scale));
  const float difference = m.mean - all.mean;
  all.m2 = lanes_sum<L>(fma(m.count * difference, difference, m.m2));
  return all;
}

inline Moments simd_merge(Moments m) {
  return lanes_merge<32>(m, simd_sum(m.count), 0);
}

// Of what each simdgroup has in all of its lanes. One barrier; scratch[96].
inline Moments simdgroups_merge(Moments m, threadgroup float* scratch, ThreadPosition position) {
  if (position.lane == 0) {
    scratch[position.simdgroup] = m.count;
    scratch[32 + position.simdgroup] = m.mean;
    scratch[64 + position.simdgroup] = m.m2;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Moments other = Moments{0, 0, 0};
  if (position.lane < position.simdgroups) {
    other = Moments{scratch[position.lane], scratch[32 + position.lane], scratch[64 + position.lane]};
  }
  return simd_merge(other);
}

// Scaled sum of the packs first, first + stride, ... and of the edge element; what lies outside the row holds zeros.
template <typename T, int N>
inline float part_sum(thread const RowPart<T, N>& part) {
  float sum = add_scaled(0.0f, float(part.edge));
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float v[16 / sizeof(T)];
    unpack<T>(part.packs[i], v);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      sum = add_scaled(sum, v[j]);
    }
  }
  return sum;
}

// Sum of (x - mean)^2 over the packs below end, and over the edge element if this thread has one.
template <typename T, int N>
inline float part_deviation(
    thread const RowPart<T, N>& part, float mean, bool has_edge, uint first, uint stride, uint end) {
  const float half_mean = 0.5f * mean;
  const float from_mean = half_centred(float(part.edge), half_mean);
  float sum = has_edge ? from_mean * from_mean : 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (first + i * stride < end) {
      float v[16 / sizeof(T)];
      unpack<T>(part.packs[i], v);
#pragma unroll
      for (int j = 0; j < pack_size<T>(); ++j) {
        const float difference = half_centred(v[j], half_mean);
        sum += difference * difference;
      }
    }
  }
  return 4.0f * sum;
}

// Moments of the packs below end, and of the edge element if this thread has one. They are taken in one pass, so that
// no unpacked value is held, from the mean of the first pack: it is among them, so that what is taken off the squares
// in the end is at most N times what is left, however far the mean is from zero.
template <typename T, int N>
inline Moments part_moments(thread const RowPart<T, N>& part, bool has_edge, uint first, uint stride, uint end) {
  // What differs from the origin is taken a quarter: squares may grow by N before the last step.
  constexpr float quarter = 0.25f;
  float origin = 0;
  if (first < end) {
    float v[16 / sizeof(T)];
    unpack<T>(part.packs[0], v);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      origin = fma(v[j], quarter / float(pack_size<T>()), origin);
    }
  } else if (has_edge) {
    origin = quarter * float(part.edge);
  }
  uint count = has_edge ? 1 : 0;
  const float edge = has_edge ? fma(float(part.edge), quarter, -origin) : 0.0f;
  float sum = add_scaled(0.0f, edge);
  float squares = edge * edge;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (first + i * stride < end) {
      float v[16 / sizeof(T)];
      unpack<T>(part.packs[i], v);
#pragma unroll
      for (int j = 0; j < pack_size<T>(); ++j) {
        const float difference = fma(v[j], quarter, -origin);
        sum = add_scaled(sum, difference);
        squares = fma(difference, difference, squares);
      }
      count += pack_size<T>();
    }
  }
  const float n = float(count);
  const float shift = scaled_mean(sum, max(n, 1.0f));
  constexpr float whole = 1.0f / quarter;
  const float m2 = squares < INFINITY ? max(squares - n * shift * shift, 0.0f) : squares;
  return Moments{n, whole * (origin + shift), whole * whole * m2};
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
