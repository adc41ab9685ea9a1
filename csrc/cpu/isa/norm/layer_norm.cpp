#include "cpu/norm/layer_norm.h"

#include "cpu/isa/norm/gradient_sums.h"
#include "cpu/isa/norm/row_mean.h"

namespace mittens::cpu::MITTENS_ISA {

// y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias.
template <typename T>
struct LayerNorm {
  const T* x;
  const T* weight;
  const T* bias;
  T* y;
  size_t columns;
  float eps;
  bool through;

  static constexpr size_t rows_together = 1;
  static constexpr size_t bytes = 2 * sizeof(T);
  // x - start, which took a conversion; in long rows it would leave the first cache.
  static constexpr bool keeps(size_t blocks) {
    return sizeof(T) == 2 && blocks == 1;
  }
  struct Stats {
    float count, mean, squares, start;  // squares: sum of (x - mean)^2
  };

  // Where float32 overflows on the way, once more from the mean itself.
  Stats reduce(const Block& block) const {
    const T* values = x + block.row * columns + block.begin;
    const Stats stats = reduce_from(centre(values, block.size), block);
    if (stats.squares < infinity) {
      return stats;
    }
    const float mean = wide_mean(values, block.size);
    return {stats.count, mean, reduce_from(mean, block).squares, mean};
  }

  Stats reduce_from(float start, const Block& block) const {
    const T* values = x + block.row * columns + block.begin;
    const float count = static_cast<float>(block.size);
    Sums sum, squares;
    each_unit_into(
        block.size,
        [&](size_t i, auto part, int k) MITTENS_INLINED {
          const Floats c = filled<T>(load(values + i, part), part, start) - start;
          sum.add(k, c);
          squares.add_product(k, c, c);
          if (block.kept) {
            store(block.kept + i, c);
          }
        },
        sum, squares);
    const float step = sum.total() / count;
    return {count, start + step, about_mean(squares.total(), step, count), start};
  }

  // Chan, Golub and LeVeque's formula.
  static Stats merge(Stats a, Stats b) {
    const float count = a.count + b.count, share = b.count / count, step = b.mean - a.mean;
    return {count, merged_mean(a.mean, b.mean, share), a.squares + b.squares + a.count * share * step * step, 0.0f};
  }

  void map(const Block& block, Stats row, Stats own) const {
    const size_t at = block.row * columns + block.begin;
    const float n = inverse_root(positive(row.squares) / row.count + eps);
    const size_t next = at + block.size;
    const float mean = mean_to_take(row.mean, n), rest = row.mean - own.start;
    const float* kept = n == 0 ? nullptr : block.kept;  // x - start may have overflowed
    const bool past = through && aligned(y + at);
    each_unit(block.size, [&, *this](size_t i, auto part, int) MITTENS_INLINED {
      prefetch(x + next + i);
      Floats v = kept ? load(kept + i) - rest : load(x + at + i, part) - mean;
      v = v * n;
      if (weight) {
        v = round_precision<T>(v) * load(weight + block.begin + i, part);
      }
      if (bias) {
        v = round_precision<T>(v) + load(bias + block.begin + i, part);
      }
      store(y + at + i, v, part, past);
    });
  }
};

// With n = 1 / sqrt(variance(x) + eps), c = x - mean(x) and g = dy * weight:
// dx = n * (g - mean(g) - n^2 * mean(g * c) * c); dweight and dbias: sums over rows of dy * c * n and of dy.
template <typename T>
struct LayerNormVjp {
  const T* x;
  const T* weight;
  const T* dy;
  T* dx;
  GradientSums dweight;
  GradientSums dbias;
  size_t columns;
  float eps;
  bool through;

  static constexpr size_t rows_together = GradientSums::rows;
  static constexpr size_t bytes = 3 * sizeof(T);
  static constexpr bool keeps(size_t) {
    return false;
  }
  struct Stats {
    float count, mean, squares, gradient, dot;  // gradient: mean of g; dot: sum of (x - mean) * g
  };

  template <typename Part>
  MITTENS_INLINE Floats scaled(Floats g, size_t column, Part part) const {
    return weight ? g * load(weight + column, part) : g;
  }

  Stats reduce(const Block& block) const {
    const T* values = x + block.row * columns + block.begin;
    Stats stats = reduce_from(centre(values, block.size), block);
    if (!(stats.squares < infinity)) {
      const float mean = wide_mean(values, block.size);
      stats = reduce_from(mean, block);
      stats.mean = mean;
    }
    return stats;
  }

  Stats reduce_from(float start, const Block& block) const {
    const size_t at = block.row * columns + block.begin;
    const float count = static_cast<float>(block.size);
    Sums sum, squares, gradient, dot;
    each_unit_into(
        block.size,
        [&, *this](size_t i, auto part, int k) MITTENS_INLINED {
          const Floats c = filled<T>(load(x + at + i, part), part, start) - start;
          const Floats g = scaled(load(dy + at + i, part), block.begin + i, part);
          sum.add(k, c);
          squares.add_product(k, c, c);
          gradient.add(k, g);
          dot.add_product(k, c, g);
        },
        sum, squares, gradient, dot);
    const float step = sum.total() / count, mean_gradient = gradient.total() / count;
    return {count, start + step, about_mean(squares.total(), step, count), mean_gradient,
            dot.total() - step * mean_gradient * count};
  }

  // As in LayerNorm, for covariances too.
  static Stats merge(Stats a, Stats b) {
    const float count = a.count + b.count, share = b.count / count;
    const float step = b.mean - a.mean, gradient_step = b.gradient - a.gradient;
    return {count, merged_mean(a.mean, b.mean, share), a.squares + b.squares + a.count * share * step * step,
            a.gradient + gradient_step * share, a.dot + b.dot + a.count * share * step * gradient_step};
  }

  void map(const Block& block, Stats row, Stats) const {
    const size_t at = block.row * columns + block.begin;
    const float n = inverse_root(positive(row.squares) / row.count + eps);
    const size_t next = at + block.size;
    const float slope = n > 0 ? -n * n * (row.dot / row.count) : 0;  // 0: overflowed, as dot may have
    const float mean = mean_to_take(row.mean, n);
    const bool past = through && aligned(dx + at);
    each_unit(block.size, [&, *this](size_t i, auto part, int) MITTENS_INLINED {
      prefetch(x + next + i);
      prefetch(dy + next + i);
      const Floats centred = load(x + at + i, part) - mean;
      const Floats g = load(dy + at + i, part);
      store(dx + at + i, (scaled(g, block.begin + i, part) - row.gradient + centred * slope) * n, part, past);
      dweight.add(block.row, block.begin + i, g * (centred * n));
      dbias.add(block.row, block.begin + i, g);
    });
  }
};

void layer_norm(Type type, const void* x, const void* weight, const void* bias, void* y, size_t rows, size_t columns,
                float eps) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const bool through = passes_caches(rows * columns * sizeof(T), y, x);
    const LayerNorm<T> op{(const T*)x, (const T*)weight, (const T*)bias, (T*)y, columns, eps, through};
    Rows(op, rows, columns).run();
  });
}

void layer_norm_vjp(Type type, const void* x, const void* weight, const void* dy, void* dx, void* dweight, void* dbias,
                    size_t rows, size_t columns, float eps) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const bool through = passes_caches(rows * columns * sizeof(T), dx, x, dy);
    const size_t size = GradientSums::size(rows, columns), stride = padded(columns);
    const Scratch weight_memory(dweight ? size : 0), bias_memory(dbias ? size : 0);
    const GradientSums weight_sums{dweight ? weight_memory.data() : nullptr, stride};
    const GradientSums bias_sums{dbias ? bias_memory.data() : nullptr, stride};
    const LayerNormVjp<T> op{(const T*)x, (const T*)weight, (const T*)dy, (T*)dx, weight_sums,
                             bias_sums,   columns,          eps,          through};
    Rows(op, rows, columns).run();
    weight_sums.finish((T*)dweight, rows, columns);
    bias_sums.finish((T*)dbias, rows, columns);
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
