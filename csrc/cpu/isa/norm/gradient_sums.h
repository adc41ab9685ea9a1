// Sums over rows for a weight's gradient, the same for any number of threads: float32 sums of `rows` rows each,
// then the sum of those in order, with its rounding errors carried along.
#pragma once

#include "cpu/isa/row_op.h"

namespace mittens::cpu::MITTENS_ISA {

struct GradientSums {
  float* data;  // [row blocks, stride], the elements of a unit in the order of Floats; nullptr: not wanted
  size_t stride;  // columns, in whole units

  static constexpr size_t rows = 32;  // of one block; an op's rows_together

  static size_t size(size_t all_rows, size_t columns) {
    return ceil_divide(all_rows, rows) * padded(columns);
  }

  MITTENS_INLINE void add(size_t row, size_t column, Floats v) const {
    if (data) {
      float* sum = data + row / rows * stride + column;
      store(sum, row % rows ? load(sum) + v : v);
    }
  }

  template <typename T>
  void finish(T* gradient, size_t all_rows, size_t columns) const {
    if (!gradient) {
      return;
    }
    const size_t blocks = ceil_divide(all_rows, rows);
    const size_t grain = blocks * columns * sizeof(float) <= serial_bytes ? columns : piece;
    parallel_for(columns, grain, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; i += piece) {
        sum_blocks(gradient + i, data + i, blocks, smaller(piece, end - i));
      }
    });
  }

 private:
  static MITTENS_INLINE Float or_zero(Float v) {
    return v == v ? v : Float{};
  }

  static constexpr size_t piece = 256;  // columns whose running sums stay in the first cache

  template <typename T>
  void sum_blocks(T* gradient, const float* block, size_t blocks, size_t columns) const {
    alignas(64) float sums[piece] = {}, errors[piece] = {};
    const size_t n = padded(columns);
    for (size_t i = 0; i < blocks; ++i, block += stride) {
      each_unit(n, [&](size_t column, auto, int) MITTENS_INLINED {
        const Floats sum = load(sums + column);
        const Floats v = load(block + column) - load(errors + column);
        const Floats next = sum + v;
        const Floats error = (next - sum) - v;  // NaN of an infinite sum, which has none
        store(errors + column, Floats{or_zero(error.a), or_zero(error.b)});
        store(sums + column, next);
      });
    }
    each_unit(columns, [&](size_t column, auto part, int)
                           MITTENS_INLINED { store(gradient + column, load(sums + column), part); });
  }
};

}  // namespace mittens::cpu::MITTENS_ISA
