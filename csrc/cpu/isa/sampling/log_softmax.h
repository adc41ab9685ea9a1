// The logarithm, and logarithmic probabilities along rows.
#pragma once

#include "cpu/isa/row_op.h"

namespace mittens::cpu::MITTENS_ISA {

// The logarithm of normal positive numbers, within 2 ulp.
MITTENS_INLINE Float log(Float x) {
  const Int above = (Int)(((UInt)x - 0x3f2aaaabu) & 0xff800000u);
  const Float f = (Float)((Int)x - above) - 1.0f;
  const Float e = __builtin_convertvector(above >> 23, Float);
  Float p = fma(f, 0x1.1f3fbcp-3f, -0x1.3b28ccp-3f);
  p = fma(p, f, Float{} + 0x1.1ea2ecp-3f);
  p = fma(p, f, Float{} - 0x1.5032cep-3f);
  p = fma(p, f, Float{} + 0x1.99d41ep-3f);
  p = fma(p, f, Float{} - 0x1.001480p-2f);
  p = fma(p, f, Float{} + 0x1.5554fap-2f);
  p = fma(p, f, Float{} - 0x1.ffffd6p-2f);
  return fma(e, Float{} + 0x1.62e430p-1f, fma(p, f * f, f));
}

MITTENS_INLINE float log(float x) {
  return log(Float{} + x)[0];
}

// y = x - log(sum(e^x)), whose NaN is everywhere in its row, as mx has it.
template <typename T>
struct LogSoftmax {
  const T* x;
  T* y;
  size_t columns;

  static constexpr size_t rows_together = 1;
  static constexpr size_t bytes = 2 * sizeof(T);
  static constexpr bool keeps(size_t) {
    return false;
  }
  struct Stats {
    float max, sum;  // sum of e^(x - max)
  };

  Stats reduce(const Block& block) const {
    const T* values = x + block.row * columns + block.begin;
    Maxima maxima;
    each_unit(block.size, [&](size_t i, auto part, int k)
                              MITTENS_INLINED { maxima.add(k, filled<T>(load(values + i, part), part, -infinity)); });
    const float max = maxima.total();
    const float shift = max == -infinity ? 0.0f : max;
    Sums sum;
    each_unit_into(
        block.size,
        [&](size_t i, auto part, int k) MITTENS_INLINED {
          sum.add(k, exp_below<float>(filled<T>(load(values + i, part), part, -infinity), shift));
        },
        sum);
    return {max, sum.total()};
  }

  static Stats merge(Stats a, Stats b) {
    const float max = a.max > b.max ? a.max : b.max;
    const auto rescaled = [max](Stats s) { return s.max == max ? s.sum : s.sum * exp(s.max - max); };
    return {max, rescaled(a) + rescaled(b)};
  }

  void map(const Block& block, Stats row, Stats) const {
    const size_t at = block.row * columns + block.begin;
    // NaN has no logarithm of these bits, and infinity is its own logarithm of a sum.
    const float rest = row.sum == row.sum ? log(row.sum) : row.max == infinity ? 0.0f : row.sum;
    each_unit(block.size, [&](size_t i, auto part, int)
                              MITTENS_INLINED { store(y + at + i, load(x + at + i, part) - row.max - rest, part); });
  }
};

}  // namespace mittens::cpu::MITTENS_ISA
