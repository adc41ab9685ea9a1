// Count, mean and sum of squared deviations of a set of values; two such merge without cancellation (Chan, Golub and
// LeVeque 1979). For rows that do not stay in registers.
//
// The mean of finite values is finite whatever their size, and an m2 past the range of float32 is infinite and
// never NaN: sums that could overflow on the way are taken of values scaled by a power of two, in a multiply-add where
// an addition would be.
#pragma once

#include "mittens/reduce.h"
#include "mittens/row_op.h"

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

// Half of x - mean, which itself may be past the range of float32. Halves are exact: a factor of twice its size makes
// up for it.
inline float half_centred(float x, float half_mean) {
  return fma(x, 0.5f, -half_mean);
}

template <typename T>
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

// Of the L lanes that share a row, at once; their counts add up to `total`, where that is known and not 0. Averages
// differences from the first lane's mean, so that a mean far from zero costs no digits.
template <typename T, int L>
inline Moments across(Moments m, uint lane, float total) {
  constexpr float scale = 1.0f / 8589934592.0f;  // 2^-33: no count times it reaches 1
  const float count = L < 32 || total > 0 ? total : lanes_sum<L>(m.count);
  const float half_origin = 0.5f * simd_shuffle(m.mean, ushort(lane & ~(L - 1)));
  const float sum = lanes_sum<L>(m.count * scale * fma(0.5f, m.mean, -half_origin));
  Moments all;
  all.count = count;
  all.mean = 2.0f * (half_origin + sum / (max(count, 1.0f) * scale));
  const float difference = m.mean - all.mean;
  all.m2 = lanes_sum<L>(fma(m.count * difference, difference, m.m2));
  return all;
}

template <typename P>
inline void write_stat(P p, Moments m) {
  p[0] = m.count;
  p[1] = m.mean;
  p[2] = m.m2;
}

template <typename P>
inline void read_stat(P p, thread Moments& m) {
  m = Moments{p[0], p[1], p[2]};
}

// Moments of the packs below end, and of the edge element if this thread has one. They are taken in one pass, so that
// no unpacked value is held, from the mean of the first pack: it is among them, so that the term that is subtracted
// from the squares in the end is at most N times the rest, however far the mean is from zero.
template <typename T, int K, int N>
inline Moments moments_of(thread const RowParts<T, K, N>& parts, RowBatch batch) {
  // Differences from the origin are taken a quarter: squares may grow by N before the last step.
  constexpr float quarter = 0.25f;
  float origin = 0;
  if (batch.has(0)) {
    float v[16 / sizeof(T)];
    unpack<T>(parts.packs[0][0], v);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      origin = fma(v[j], quarter / float(pack_size<T>()), origin);
    }
  } else if (batch.edge) {
    origin = quarter * float(parts.edges[0]);
  }
  uint count = batch.edge ? 1 : 0;
  const float edge = batch.edge ? fma(float(parts.edges[0]), quarter, -origin) : 0.0f;
  float sum = add_scaled(0.0f, edge);
  float squares = edge * edge;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (batch.has(i)) {
      float v[16 / sizeof(T)];
      unpack<T>(parts.packs[0][i], v);
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

}  // namespace mittens
