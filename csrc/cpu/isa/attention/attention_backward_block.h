// Blocks of rows against blocks of keys for the gradients of attention. Lanes are rows while weights are computed, as
// in attention_row_block.h, and columns where they are multiplied with queries, keys and cotangents.
#pragma once

#include "cpu/attention/attention_backward.h"
#include "cpu/isa/attention/attention_row_block.h"

namespace mittens::cpu::MITTENS_ISA {

// Registers of a product whose lanes are columns: `column_tall` rows times `column_wide` vectors.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr size_t column_tall = 8;
#elif defined(__AVX2__)
constexpr size_t column_tall = 6;
#else
constexpr size_t column_tall = 4;
#endif
constexpr size_t column_wide = 2;

constexpr size_t tile_rows = wide * width;
constexpr size_t block_rows = 96 / tile_rows * tile_rows;
constexpr size_t block_keys = 64 / column_tall * column_tall;

// The left factor of a product: element (i, k) is at[i * outer + k * inner].
struct Factor {
  const float* at;
  size_t outer;
  size_t inner;
};

// Rows of float32 in memory.
struct Panel {
  float* at;
  size_t stride;

  float* row(size_t i) const {
    return at + i * stride;
  }

  // Rows start in different sets of the cache, and have room for whole vectors.
  static size_t stride_of(size_t columns) {
    return ceil_divide(columns, 32) * 32 + 16;
  }
};

// c = a b, or c += a b, of `rows` rows and `columns` columns in whole vectors, over `count` rows of b.
template <size_t n, size_t vectors>
void product(size_t rows, size_t columns, Factor a, Panel b, size_t count, Panel c, bool adds) {
  in_pieces<n>(0, rows, [&](size_t i, auto height) MITTENS_INLINED {
    in_pieces<vectors>(0, columns / width, [&](size_t j, auto breadth) MITTENS_INLINED {
      Float sums[height()][breadth()];
      float* const to = c.row(i) + j * width;
      unrolled<height()>([&](size_t r) MITTENS_INLINED {
        unrolled<breadth()>([&](size_t v) MITTENS_INLINED {
          sums[r][v] = adds ? read<Float>(to + r * c.stride + v * width, All()) : Float{};
        });
      });
      const float* left = a.at + i * a.outer;
      const float* right = b.at + j * width;
      for (size_t k = 0; k < count; ++k, left += a.inner, right += b.stride) {
        Float row[breadth()];
        unrolled<breadth()>([&](size_t v) MITTENS_INLINED { row[v] = read<Float>(right + v * width, All()); });
        unrolled<height()>([&](size_t r) MITTENS_INLINED {
          const Float x = spread(left[r * a.outer]);
          unrolled<breadth()>([&](size_t v) MITTENS_INLINED { sums[r][v] = fma(x, row[v], sums[r][v]); });
        });
      }
      unrolled<height()>([&](size_t r) MITTENS_INLINED {
        unrolled<breadth()>([&](size_t v) MITTENS_INLINED { write(to + r * c.stride + v * width, sums[r][v], All()); });
      });
    });
  });
}

// Copies rows with 0 for elements that are not finite.
inline void copy_finite(Panel from, Panel to, size_t rows, size_t columns) {
  for (size_t i = 0; i < rows; ++i) {
    for (size_t c = 0; c < columns; c += width) {
      const Float v = read<Float>(from.row(i) + c, All());
      write(to.row(i) + c, v - v == 0.0f ? v : Float{}, All());
    }
  }
}

inline bool may_hide(const Attention& call) {
  return call.causal || call.window != 0 || call.mask.kind != MaskKind::none;
}

// A key/value head of the call with its rows' cotangents, in the order of Head.
template <typename T>
struct BackwardHead {
  Head<T> head;
  Head<T> cotangents;  // its queries are dy
  const float* logsumexp;  // [batch, heads, queries]
  const float* delta;
};

// Some rows of a head, packed, and the weights of some keys for them.
template <typename T>
class BackwardBlock {
 public:
  static size_t memory(const Attention& call) {
    const size_t columns = call.width + call.value_width;
    const size_t strides = Panel::stride_of(call.width) + Panel::stride_of(call.value_width);
    return block_rows * (columns + strides + 2) + 3 * block_keys * block_rows;
  }

  BackwardBlock(const BackwardHead<T>& of, float* memory) : of_(of), call_(of.head.call) {
    const auto take = [&](size_t size) {
      float* p = memory;
      memory += size;
      return p;
    };
    turned_q_ = take(block_rows * call_.width);
    turned_dy_ = take(block_rows * call_.value_width);
    q_ = {nullptr, Panel::stride_of(call_.width)};
    q_.at = take(block_rows * q_.stride);
    dy_ = {nullptr, Panel::stride_of(call_.value_width)};
    dy_.at = take(block_rows * dy_.stride);
    logsumexp_ = take(block_rows);
    delta_ = take(block_rows);
    p_ = {take(block_keys * block_rows), block_rows};
    ds_ = {take(block_keys * block_rows), block_rows};
    mask_ = {take(block_keys * block_rows), block_rows};
  }

  // Takes up rows [first, first + n), at most block_rows.
  void pack(size_t first, size_t n) {
    first_ = first;
    n_ = n;
    const Float scale = spread(call_.scale);
    pack(of_.head, call_.width, scale, q_, turned_q_);
    pack(of_.cotangents, call_.value_width, Float{} + 1.0f, dy_, turned_dy_);
    if (may_hide(call_)) {
      copy_finite(q_, q_, n, padded_width(call_.width));
    }
    for (size_t i = 0; i < padded_rows(); ++i) {
      const bool is_row = i < n;
      const size_t index = is_row ? of_.head.index(first + i) : 0;
      const Range range = is_row ? of_.head.range(first + i) : Range{0, 0};
      // A row without a score has weights of 0.
      const float logsumexp = is_row ? of_.logsumexp[index] : infinity;
      logsumexp_[i] = logsumexp == -infinity ? infinity : logsumexp;
      delta_[i] = is_row ? of_.delta[index] : 0.0f;
      low_[i] = static_cast<int32_t>(range.begin);
      high_[i] = static_cast<int32_t>(range.end);
    }
  }

  // Computes p and ds of keys [begin, begin + count), which start the panels. Returns whether a row may see one.
  bool weigh(Panel k, Panel v, size_t begin, size_t count) {
    const bool masked = call_.mask.kind != MaskKind::none;
    if (masked && !pack_mask(begin, count)) {
      return false;
    }
    for (size_t r = 0; r < padded_rows(); r += tile_rows) {
      const size_t rows = smaller(tile_rows, padded_rows() - r);
      product<tall, wide>(count, rows, {k.at, k.stride, 1}, {turned_q_ + r * call_.width, tile_rows}, call_.width,
                          {p_.at + r, p_.stride}, false);
      product<tall, wide>(count, rows, {v.at, v.stride, 1}, {turned_dy_ + r * call_.value_width, tile_rows},
                          call_.value_width, {ds_.at + r, ds_.stride}, false);
    }
    for (size_t r = 0; r < padded_rows(); r += width) {
      masked ? weigh_rows<true>(r, begin, count) : weigh_rows<false>(r, begin, count);
    }
    return true;
  }

  Range seen() const {
    return of_.head.range(first_, n_);
  }
  size_t rows() const {
    return n_;
  }
  size_t padded_rows() const {
    return padded_width(n_);
  }
  // [keys, rows]
  Panel p() const {
    return p_;
  }
  Panel ds() const {
    return ds_;
  }
  // [rows, ..]: the queries scaled, with 0 for elements that are not finite where keys may be hidden.
  Panel q() const {
    return q_;
  }
  Panel dy() const {
    return dy_;
  }

 private:
  void pack(const Head<T>& from, size_t columns, Float scale, Panel rows, float* turned) const {
    for (size_t i = 0; i < padded_rows(); ++i) {
      const T* row = from.query(first_ + (i < n_ ? i : 0));
      each_vector(columns, [&](size_t c, auto part)
                               MITTENS_INLINED { write(rows.row(i) + c, load_one(row + c, part) * scale, All()); });
    }
    for (size_t r = 0; r < padded_rows(); r += width) {
      float* const to = turned + r / tile_rows * tile_rows * columns + r % tile_rows;
      for (size_t c = 0; c < columns; c += width) {
        Float v[width];
        for (size_t i = 0; i < width; ++i) {
          v[i] = read<Float>(rows.row(r + i) + c, All());
        }
        transpose(v);
        for (size_t i = 0; i < width && c + i < columns; ++i) {
          write(to + (c + i) * tile_rows, v[i], All());
        }
      }
    }
  }

  bool pack_mask(size_t begin, size_t count) {
    Float most = Float{} - infinity;
    for (size_t r = 0; r < padded_rows(); r += width) {
      for (size_t c = 0; c < count; c += width) {
        Float v[width];
        for (size_t i = 0; i < width; ++i) {
          v[i] = r + i < n_ ? of_.head.mask(first_ + r + i, begin + c, count - c) : Float{} - infinity;
        }
        transpose(v);
        for (size_t i = 0; i < width && c + i < count; ++i) {
          write(mask_.row(c + i) + r, v[i], All());
          most = v[i] == -infinity ? most : Float{} + 1.0f;
        }
      }
    }
    return maximum_of(most) > -infinity;
  }

  template <bool masked>
  void weigh_rows(size_t r, size_t begin, size_t count) {
    const Float logsumexp = read<Float>(logsumexp_ + r, All()), delta = read<Float>(delta_ + r, All());
    const Int low = read<Int>(low_ + r, All()), high = read<Int>(high_ + r, All());
    for (size_t j = 0; j < count; ++j) {
      const Int key = Int{} + static_cast<int32_t>(begin + j);
      Int visible = key >= low & key < high;
      float* const to_p = p_.row(j) + r;
      float* const to_ds = ds_.row(j) + r;
      Float score = read<Float>(to_p, All());
      if constexpr (masked) {
        const Float mask = read<Float>(mask_.row(j) + r, All());
        score = of_.head.masked(score, mask);
        visible &= (Int)(mask != -infinity);
      }
      const Float p = exp_one<T>(score - logsumexp);
      const Float ds = p * (read<Float>(to_ds, All()) - delta);
      write(to_p, visible ? p : Float{}, All());
      write(to_ds, visible ? ds : Float{}, All());
    }
  }

  const BackwardHead<T>& of_;
  const Attention& call_;
  size_t first_ = 0;
  size_t n_ = 0;
  float* turned_q_;  // [tiles, columns, tile_rows]
  float* turned_dy_;
  Panel q_;
  Panel dy_;
  float* logsumexp_;
  float* delta_;
  Panel p_;
  Panel ds_;
  Panel mask_;
  int32_t low_[block_rows];  // the first key that a row sees, and the one after the last
  int32_t high_[block_rows];
};

}  // namespace mittens::cpu::MITTENS_ISA
