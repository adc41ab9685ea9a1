#include "cpu/norm/softmax.h"

#include "cpu/isa/row_op.h"

namespace mittens::cpu::MITTENS_ISA {

// y = exp(x - max(x)) / sum(exp(x - max(x))). Each block keeps its exponentials, relative to its own maximum.
template <typename T>
struct Softmax {
  const T* x;
  T* y;
  size_t columns;
  bool through;

  static constexpr size_t rows_together = 1;
  static constexpr size_t bytes = 2 * sizeof(T);
  static constexpr bool keeps(size_t) {
    return true;
  }
  struct Stats {
    float max, sum;  // sum of exp(x - max)
  };

  Stats reduce(const Block& block) const {
    const T* values = x + block.row * columns + block.begin;
    Maxima maxima;
    each_unit(block.size, [&](size_t i, auto part, int k)
                              MITTENS_INLINED { maxima.add(k, filled<T>(load(values + i, part), part, -infinity)); });
    const float max = maxima.total();
    const float shift = max == -infinity ? 0.0f : max;  // a block of -inf adds nothing, not NaN
    Sums sum;
    each_unit_into(
        block.size,
        [&](size_t i, auto part, int k) MITTENS_INLINED {
          prefetch(values + block.size + i);
          const Floats e = exp_below<T>(filled<T>(load(values + i, part), part, -infinity), shift);
          store(block.kept + i, e);
          sum.add(k, e);
        },
        sum);
    return {max, sum.total()};
  }

  static Stats merge(Stats a, Stats b) {
    const float max = a.max > b.max ? a.max : b.max;
    return {max, rescaled(a.sum, a.max, max) + rescaled(b.sum, b.max, max)};
  }

  void map(const Block& block, Stats row, Stats own) const {
    T* values = y + block.row * columns + block.begin;
    const float scale = rescaled(1.0f, own.max, row.max) / row.sum;
    const bool past = through && aligned(values);
    each_unit(block.size, [&](size_t i, auto part, int)
                              MITTENS_INLINED { store(values + i, load(block.kept + i) * scale, part, past); });
  }

  // From multiples of exp(from) to multiples of exp(to); both may be -inf.
  static float rescaled(float v, float from, float to) {
    return from == to ? v : v * exp(from - to);
  }
};

// dx = y * (dy - sum(y * dy) / sum(y)); of a row so long that all y round to zero, zero.
template <typename T>
struct SoftmaxVjp {
  const T* y;
  const T* dy;
  T* dx;
  size_t columns;
  bool through;

  static constexpr size_t rows_together = 1;
  static constexpr size_t bytes = 3 * sizeof(T);
  static constexpr bool keeps(size_t) {
    return false;
  }
  struct Stats {
    float dot, sum;
  };

  Stats reduce(const Block& block) const {
    const size_t at = block.row * columns + block.begin;
    Sums dot, sum;
    each_unit_into(
        block.size,
        [&](size_t i, auto part, int k) MITTENS_INLINED {
          const Floats weights = load(y + at + i, part);
          dot.add_product(k, weights, load(dy + at + i, part));
          sum.add(k, weights);
        },
        dot, sum);
    return {dot.total(), sum.total()};
  }

  static Stats merge(Stats a, Stats b) {
    return {a.dot + b.dot, a.sum + b.sum};
  }

  void map(const Block& block, Stats row, Stats) const {
    const size_t at = block.row * columns + block.begin;
    const size_t next = at + block.size;
    const float mean = row.sum == 0 ? 0 : row.dot / row.sum;
    const bool past = through && aligned(dx + at);
    each_unit(block.size, [&, *this](size_t i, auto part, int) MITTENS_INLINED {
      prefetch(y + next + i);
      prefetch(dy + next + i);
      store(dx + at + i, load(y + at + i, part) * (load(dy + at + i, part) - mean), part, past);
    });
  }
};

void softmax(Type type, const void* x, void* y, size_t rows, size_t columns) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const bool through = passes_caches(rows * columns * sizeof(T), y, x);
    const Softmax<T> op{(const T*)x, (T*)y, columns, through};
    Rows(op, rows, columns).run();
  });
}

void softmax_vjp(Type type, const void* y, const void* dy, void* dx, size_t rows, size_t columns) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const bool through = passes_caches(rows * columns * sizeof(T), dx, y, dy);
    const SoftmaxVjp<T> op{(const T*)y, (const T*)dy, (T*)dx, columns, through};
    Rows(op, rows, columns).run();
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
