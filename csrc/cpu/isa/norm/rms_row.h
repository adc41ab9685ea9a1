// y = round(x / sqrt(mean(x^2) + eps)) * (weight + weight_offset), row by row: a source gives x, a sink takes y.
#pragma once

#include "cpu/isa/row_op.h"

namespace mittens::cpu::MITTENS_ISA {

// A source has `arrays`, how many it reads, and at(row, column), whose result gives the elements from there on:
//   Floats load(i, part)
//   void prefetch_at(i)
// A sink has `arrays`, how many it reads or writes, and at(row, column), whose result takes them:
//   void store(i, x, y, part)                    of an element and its norm

template <typename T>
struct RowsOf {
  const T* x;  // [rows, columns]
  size_t columns;

  static constexpr size_t arrays = 1;
  MITTENS_INLINE RowsOf at(size_t row, size_t column) const {
    return {x + row * columns + column, columns};
  }
  template <typename Part>
  MITTENS_INLINE Floats load(size_t i, Part part) const {
    return cpu::MITTENS_ISA::load(x + i, part);
  }
  MITTENS_INLINE void prefetch_at(size_t i) const {
    prefetch(x + i);
  }
};

// round(x + residual).
template <typename T>
struct SumOfRows {
  RowsOf<T> x;
  RowsOf<T> residual;

  static constexpr size_t arrays = 2;
  MITTENS_INLINE SumOfRows at(size_t row, size_t column) const {
    return {x.at(row, column), residual.at(row, column)};
  }
  template <typename Part>
  MITTENS_INLINE Floats load(size_t i, Part part) const {
    return round<T>(x.load(i, part) + residual.load(i, part));
  }
  MITTENS_INLINE void prefetch_at(size_t i) const {
    x.prefetch_at(i);
    residual.prefetch_at(i);
  }
};

template <typename T>
struct NormTo {
  T* y;  // [rows, columns]
  size_t columns;
  bool through;

  static constexpr size_t arrays = 1;
  MITTENS_INLINE NormTo at(size_t row, size_t column) const {
    T* p = y + row * columns + column;
    return {p, columns, through && aligned(p)};
  }
  template <typename Part>
  MITTENS_INLINE void store(size_t i, Floats, Floats normed, Part part) const {
    cpu::MITTENS_ISA::store(y + i, normed, part, through);
  }
};

// Writes the normalized input to an array too.
template <typename T>
struct NormAndInputTo {
  NormTo<T> y;
  NormTo<T> x;

  static constexpr size_t arrays = 2;
  MITTENS_INLINE NormAndInputTo at(size_t row, size_t column) const {
    return {y.at(row, column), x.at(row, column)};
  }
  template <typename Part>
  MITTENS_INLINE void store(size_t i, Floats v, Floats normed, Part part) const {
    x.store(i, v, v, part);
    y.store(i, v, normed, part);
  }
};

template <typename T, typename Source, typename Sink>
struct RmsRows {
  Source source;
  Sink sink;
  const T* weight;  // [columns] or nullptr
  float weight_offset;
  size_t columns;
  float eps;

  static constexpr size_t rows_together = 1;
  static constexpr size_t bytes = (Source::arrays + Sink::arrays) * sizeof(T);
  static constexpr bool keeps(size_t) {
    return false;
  }
  struct Stats {
    float squares;
  };

  Stats reduce(const Block& block) const {
    const auto from = source.at(block.row, block.begin);
    Sums squares;
    each_unit_into(
        block.size,
        [&](size_t i, auto part, int k) MITTENS_INLINED {
          const Floats v = from.load(i, part);
          squares.add_product(k, v, v);
        },
        squares);
    return {squares.total()};
  }

  static Stats merge(Stats a, Stats b) {
    return {a.squares + b.squares};
  }

  void map(const Block& block, Stats row, Stats) const {
    const auto from = source.at(block.row, block.begin);
    const auto to = sink.at(block.row, block.begin);
    const float n = inverse_root(row.squares / static_cast<float>(columns) + eps);
    const T* const weights = weight ? weight + block.begin : nullptr;
    const float offset = weight_offset;
    each_unit(block.size, [=, size = block.size](size_t i, auto part, int) MITTENS_INLINED {
      from.prefetch_at(size + i);
      const Floats v = from.load(i, part);
      Floats normed = v * n;
      if (weights) {
        normed = round<T>(normed) * (load(weights + i, part) + offset);
      }
      to.store(i, v, normed, part);
    });
  }
};

}  // namespace mittens::cpu::MITTENS_ISA
