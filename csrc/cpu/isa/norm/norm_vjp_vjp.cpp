#include "cpu/norm/norm_vjp_vjp.h"

#include "cpu/isa/norm/gradient_sums.h"
#include "cpu/isa/norm/row_mean.h"

namespace mittens::cpu::MITTENS_ISA {

// With n = 1 / sqrt(mean(x^2) + eps), h = n x, g = dy * (weight + weight_offset) and w = dy * v, all of them and u less
// their means where the norm is centred:
// by dx = n (g - mean(g h) h) and dweight = sum over rows of dy * h,
// by_x = n (n ((3 mean(g h) mean(u h) - mean(u g)) h - mean(u h) g - mean(g h) u) + w - mean(w h) h),
// by_dy = (weight + weight_offset) * d + v * h + b, where d = n (u - mean(u h) h), and by_weight = sum over rows of dy
// * d.
template <typename T, bool centred>
struct NormVjpVjpRows {
  const T* x;
  const T* weight;
  const T* dy;
  const T* u;
  const T* v;
  const T* b;
  T* by_x;
  T* by_dy;
  GradientSums by_weight;
  size_t columns;
  float eps;
  float weight_offset;

  static constexpr size_t rows_together = GradientSums::rows;
  static constexpr size_t bytes = 5 * sizeof(T);
  static constexpr bool keeps(size_t) {
    return false;
  }

  // Means of x, g, u and w, which are 0 where the norm is not centred, and sums of products about them.
  struct Stats {
    float count, x, g, u, w;
    float xx, xg, xu, xw, ug;
  };

  struct Terms {
    Floats x, g, u, w;
  };

  template <typename Part>
  MITTENS_INLINE Terms terms(size_t at, size_t column, Part part, float start) const {
    const Floats gradient = load(dy + at, part);
    Terms t{load(x + at, part), gradient, load(u + at, part), {}};
    if (weight) {
      t.g = gradient * (load(weight + column, part) + weight_offset);
    }
    if (v) {
      t.w = gradient * load(v + column, part);
    }
    if (centred) {
      t.x = filled<T>(t.x, part, start) - start;
    }
    return t;
  }

  Stats reduce(const Block& block) const {
    const T* values = x + block.row * columns + block.begin;
    if (!centred) {
      return reduce_from(0, block);
    }
    Stats stats = reduce_from(centre(values, block.size), block);
    if (!(stats.xx < infinity)) {
      const float mean = wide_mean(values, block.size);
      stats = reduce_from(mean, block);
      stats.x = mean;
    }
    return stats;
  }

  Stats reduce_from(float start, const Block& block) const {
    const size_t at = block.row * columns + block.begin;
    const float count = static_cast<float>(block.size);
    Sums x_sum, g_sum, u_sum, w_sum, xx, xg, xu, xw, ug;
    each_unit_into(
        block.size,
        [&, *this](size_t i, auto part, int k) MITTENS_INLINED {
          const Terms t = terms(at + i, block.begin + i, part, start);
          xx.add_product(k, t.x, t.x);
          xg.add_product(k, t.x, t.g);
          xu.add_product(k, t.x, t.u);
          xw.add_product(k, t.x, t.w);
          ug.add_product(k, t.u, t.g);
          if (centred) {
            x_sum.add(k, t.x);
            g_sum.add(k, t.g);
            u_sum.add(k, t.u);
            w_sum.add(k, t.w);
          }
        },
        x_sum, g_sum, u_sum, w_sum, xx, xg, xu, xw, ug);
    if (!centred) {
      return {count, 0, 0, 0, 0, xx.total(), xg.total(), xu.total(), xw.total(), ug.total()};
    }
    const float step = x_sum.total() / count;
    const float g = g_sum.total() / count, u = u_sum.total() / count, w = w_sum.total() / count;
    return {count,
            start + step,
            g,
            u,
            w,
            about_mean(xx.total(), step, count),
            xg.total() - step * g * count,
            xu.total() - step * u * count,
            xw.total() - step * w * count,
            ug.total() - u * g * count};
  }

  static Stats merge(Stats a, Stats b) {
    const float count = a.count + b.count;
    if (!centred) {
      return {count, 0, 0, 0, 0, a.xx + b.xx, a.xg + b.xg, a.xu + b.xu, a.xw + b.xw, a.ug + b.ug};
    }
    const float share = b.count / count, between = a.count * share;
    const float x = b.x - a.x, g = b.g - a.g, u = b.u - a.u, w = b.w - a.w;
    return {count,
            merged_mean(a.x, b.x, share),
            a.g + g * share,
            a.u + u * share,
            a.w + w * share,
            a.xx + b.xx + between * x * x,
            a.xg + b.xg + between * x * g,
            a.xu + b.xu + between * x * u,
            a.xw + b.xw + between * x * w,
            a.ug + b.ug + between * u * g};
  }

  void map(const Block& block, Stats row, Stats) const {
    const size_t at = block.row * columns + block.begin, next = at + block.size;
    const float n = inverse_root(positive(row.xx) / row.count + eps);
    // The squares overflowed where n is 0, as the other sums may have.
    auto mean = [&](float sum) { return n > 0 ? sum / row.count : 0; };
    const float gh = n * mean(row.xg), uh = n * mean(row.xu), wh = n * mean(row.xw);
    const float of_h = n * (3 * gh * uh - mean(row.ug)) - wh;
    const float start = centred ? mean_to_take(row.x, n) : 0;
    each_unit(block.size, [&, *this](size_t i, auto part, int) MITTENS_INLINED {
      prefetch(x + next + i);
      prefetch(dy + next + i);
      prefetch(u + next + i);
      const size_t column = block.begin + i;
      const Floats gradient = load(dy + at + i, part);
      Floats h = load(x + at + i, part), g = gradient, to_dy = load(u + at + i, part) - row.u;
      h = (centred ? h - start : h) * n;
      const Floats about_u = to_dy;
      const Floats d = (about_u - h * uh) * n;
      to_dy = d;
      if (weight) {
        const Floats scale = load(weight + column, part) + weight_offset;
        g = g * scale;
        to_dy = to_dy * scale;
      }
      Floats to_x = h * of_h - ((g - row.g) * uh + about_u * gh) * n;
      if (v) {
        const Floats factor = load(v + column, part);
        to_x = to_x + (gradient * factor - row.w);
        to_dy = to_dy + factor * h;
      }
      if (b) {
        to_dy = to_dy + load(b + column, part);
      }
      store(by_x + at + i, to_x * n, part);
      store(by_dy + at + i, to_dy, part);
      by_weight.add(block.row, column, gradient * d);
    });
  }
};

void norm_vjp_vjp(Type type, const NormVjpVjp& of) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const Scratch memory(of.by_weight ? GradientSums::size(of.rows, of.columns) : 0);
    const GradientSums sums{of.by_weight ? memory.data() : nullptr, padded(of.columns)};
    auto run = [&]<bool centred>(std::bool_constant<centred>) {
      const NormVjpVjpRows<T, centred> op{(const T*)of.x, (const T*)of.weight, (const T*)of.dy, (const T*)of.u,
                                          (const T*)of.v, (const T*)of.b,      (T*)of.by_x,     (T*)of.by_dy,
                                          sums,           of.columns,          of.eps,          of.weight_offset};
      Rows(op, of.rows, of.columns).run();
    };
    if (of.centred) {
      run(std::true_type());
    } else {
      run(std::false_type());
    }
    sums.finish((T*)of.by_weight, of.rows, of.columns);
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
