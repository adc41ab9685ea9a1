// rms_norm, add_rms_norm and their gradients.
#include "cpu/norm/rms_norm.h"

#include "cpu/isa/norm/gradient_sums.h"
#include "cpu/isa/norm/rms_row.h"

namespace mittens::cpu::MITTENS_ISA {

// With n = 1 / sqrt(mean(x^2) + eps) and g = dy * (weight + weight_offset):
// dx = n * g - n^3 * mean(g * x) * x + dsum; dweight = sum over rows of dy * x * n.
template <typename T>
struct RmsNormVjp {
  const T* x;
  const T* weight;
  const T* dy;
  const T* dsum;
  T* dx;
  GradientSums dweight;
  size_t columns;
  float eps;
  float weight_offset;
  bool through;

  static constexpr size_t rows_together = GradientSums::rows;
  static constexpr size_t bytes = 3 * sizeof(T);
  static constexpr bool keeps(size_t) {
    return false;
  }
  struct Stats {
    float squares, dot;
  };

  template <typename Part>
  MITTENS_INLINE Floats scaled(Floats g, size_t column, Part part) const {
    return weight ? g * (load(weight + column, part) + weight_offset) : g;
  }

  Stats reduce(const Block& block) const {
    const size_t at = block.row * columns + block.begin;
    Sums squares, dot;
    each_unit_into(
        block.size,
        [&](size_t i, auto part, int k) MITTENS_INLINED {
          const Floats v = load(x + at + i, part);
          squares.add_product(k, v, v);
          dot.add_product(k, v, scaled(load(dy + at + i, part), block.begin + i, part));
        },
        squares, dot);
    return {squares.total(), dot.total()};
  }

  static Stats merge(Stats a, Stats b) {
    return {a.squares + b.squares, a.dot + b.dot};
  }

  void map(const Block& block, Stats row, Stats) const {
    const size_t at = block.row * columns + block.begin;
    const float n = inverse_root(row.squares / static_cast<float>(columns) + eps);
    // The squares overflowed where n is 0, as dot may have.
    const float slope = n > 0 ? -n * n * n * (row.dot / static_cast<float>(columns)) : 0;
    const size_t next = at + block.size;
    const bool past = through && aligned(dx + at);
    each_unit(block.size, [&, *this](size_t i, auto part, int) MITTENS_INLINED {
      prefetch(x + next + i);
      prefetch(dy + next + i);
      const Floats v = load(x + at + i, part);
      const Floats g = load(dy + at + i, part);
      Floats d = scaled(g, block.begin + i, part) * n + v * slope;
      if (dsum) {
        d = d + load(dsum + at + i, part);
      }
      store(dx + at + i, d, part, past);
      dweight.add(block.row, block.begin + i, g * (v * n));
    });
  }
};

void rms_norm(Type type, const void* x, const void* weight, void* y, size_t rows, size_t columns, float eps,
              float weight_offset) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const bool through = passes_caches(rows * columns * sizeof(T), y, x);
    const RmsRows<T, RowsOf<T>, NormTo<T>> op{
        {(const T*)x, columns}, {(T*)y, columns, through}, (const T*)weight, weight_offset, columns, eps};
    Rows(op, rows, columns).run();
  });
}

void add_rms_norm(Type type, const void* x, const void* residual, const void* weight, void* y, void* sum, size_t rows,
                  size_t columns, float eps, float weight_offset) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const size_t bytes = rows * columns * sizeof(T);
    const bool through = passes_caches(bytes, y, x, residual) && passes_caches(bytes, sum, x, residual);
    const RmsRows<T, SumOfRows<T>, NormAndInputTo<T>> op{{{(const T*)x, columns}, {(const T*)residual, columns}},
                                                         {{(T*)y, columns, through}, {(T*)sum, columns, through}},
                                                         (const T*)weight,
                                                         weight_offset,
                                                         columns,
                                                         eps};
    Rows(op, rows, columns).run();
  });
}

void rms_norm_vjp(Type type, const void* x, const void* weight, const void* dy, const void* dsum, void* dx,
                  void* dweight, size_t rows, size_t columns, float eps, float weight_offset) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const bool through = passes_caches(rows * columns * sizeof(T), dx, x, dy) && dx != dsum;
    const Scratch memory(dweight ? GradientSums::size(rows, columns) : 0);
    const GradientSums sums{dweight ? memory.data() : nullptr, padded(columns)};
    const RmsNormVjp<T> op{(const T*)x, (const T*)weight, (const T*)dy, (const T*)dsum, (T*)dx,
                           sums,        columns,          eps,          weight_offset,  through};
    Rows(op, rows, columns).run();
    sums.finish((T*)dweight, rows, columns);
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
