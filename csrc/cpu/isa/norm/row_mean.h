// Means of rows, and sums about them.
#pragma once

#include "cpu/isa/row_op.h"

namespace mittens::cpu::MITTENS_ISA {

// A value near the mean: sums of x minus it lose nothing. For 2-byte types the mean of a few units is near enough.
template <typename T>
MITTENS_INLINE float centre(const T* x, size_t n) {
  Sums sum;
  const size_t sample = __is_same(T, float) ? n : smaller(n, 8 * unit);
  each_unit_into(sample, [&](size_t i, auto part, int k) MITTENS_INLINED { sum.add(k, load(x + i, part)); }, sum);
  return sum.total() / static_cast<float>(sample);
}

// The mean, where a sum in float32 may overflow.
template <typename T>
[[gnu::noinline, gnu::cold]] float wide_mean(const T* x, size_t n) {
  double sum = 0;
  each_vector(n, [&](size_t i, auto part) {
    const Float v = load_in_order(x + i, part);
    for (size_t lane = 0; lane < width; ++lane) {
      sum += v[lane];
    }
  });
  return static_cast<float>(sum / static_cast<double>(n));
}

// Sums of squares about the mean, from sums about a value `step` below it; infinity stays infinity.
MITTENS_INLINE float about_mean(float squares, float step, float count) {
  return squares < infinity ? squares - step * step * count : squares;
}

// The mean of both; share: b's of the count. By halves, since the difference may overflow.
MITTENS_INLINE float merged_mean(float a, float b, float share) {
  return 2 * (a / 2 + (b / 2 - a / 2) * share);
}

// A mean of a row to take off x before it is multiplied by n. Where the variance overflows n is 0 and x - mean may be
// infinite: then 0, so that finite x give 0, or NaN if the mean is not finite.
MITTENS_INLINE float mean_to_take(float mean, float n) {
  return n == 0 ? mean * n : mean;
}

}  // namespace mittens::cpu::MITTENS_ISA
