// Many rows at a time: lanes are rows, so that softmax needs no sum across lanes, and keys and values are read as they
// lie, one number for all lanes. Both products are small float32 GEMMs on tiles of registers.
#pragma once

#include "cpu/isa/attention/attention_state.h"

namespace mittens::cpu::MITTENS_ISA {

// Registers of a product: `tall` numbers of keys or values times `wide` vectors of rows.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr size_t tall = 8;
constexpr size_t wide = 2;
#elif defined(__AVX2__)
constexpr size_t tall = 4;
constexpr size_t wide = 3;
#else
constexpr size_t tall = 4;
constexpr size_t wide = 2;
#endif

// sums[i][v] += sum_k a[i * outer + k * inner] * b[k][v], b in vectors.
template <size_t n, size_t vectors>
MITTENS_INLINE void multiply(const float* a, size_t outer, size_t inner, const float* b, size_t count,
                             Float (&sums)[n][vectors]) {
  for (size_t k = 0; k < count; ++k, a += inner, b += vectors * width) {
    Float row[vectors];
    unrolled<vectors>([&](size_t v) MITTENS_INLINED { row[v] = read<Float>(b + v * width, All()); });
    unrolled<n>([&](size_t i) MITTENS_INLINED {
      const Float x = spread(a[i * outer]);
      unrolled<vectors>([&](size_t v) MITTENS_INLINED { sums[i][v] = fma(x, row[v], sums[i][v]); });
    });
  }
}

// `vectors` vectors of rows and their state.
template <typename T, size_t vectors>
class RowTile {
 public:
  static constexpr size_t lanes = vectors * width;

  // first: of the head's rows; n: how many of the lanes are rows.
  RowTile(const Head<T>& head, size_t first, size_t n, float* queries, float* values, float* state)
      : head_(head), first_(first), n_(n), queries_(queries), values_(values), state_(state) {}

  void start() const {
    const size_t columns = head_.call.width;
    const Float scale = spread(head_.call.scale);
    pack(columns, 0.0f, queries_, [&](size_t row, size_t c, size_t n) MITTENS_INLINED {
      const T* p = head_.query(row) + c;
      return (n < width ? load_one(p, Some{n}) : load_one(p)) * scale;
    });
    for (size_t i = 0; i < head_.call.value_width * lanes; i += width) {
      write(values_ + i, Float{}, All());
    }
    for (size_t v = 0; v < lanes; v += width) {
      write(state_ + v, Float{} - infinity, All());
      write(state_ + lanes + v, Float{}, All());
    }
  }

  Range range() const {
    return head_.range(first_, n_);
  }

  // Packs the mask of some keys; whether one of them can be seen.
  bool pack_mask(size_t begin, size_t end, float* mask) const {
    pack(end - begin, -infinity, mask,
         [&](size_t row, size_t c, size_t n) MITTENS_INLINED { return head_.mask(row, begin + c, n); });
    Float most = Float{} - infinity;
    for (size_t i = 0; i < (end - begin) * lanes; i += width) {
      const Float m = read<Float>(mask + i, All());
      most = m > -infinity ? m : m == -infinity ? most : Float{} + infinity;
    }
    return maximum_of(most) > -infinity;
  }

  // Takes up keys [begin, end), whose panels start at row 0. mask: nullptr or packed; scores: room for their scores.
  void add(const float* keys, size_t keys_stride, const float* values, size_t values_stride, size_t begin, size_t end,
           const float* mask, float* scores) const {
    const size_t count = end - begin;
    in_pieces<tall>(0, count, [&](size_t j, auto n) MITTENS_INLINED {
      Float sums[n()][vectors] = {};
      multiply(keys + j * keys_stride, keys_stride, 1, queries_, head_.call.width, sums);
      store_sums(scores + j * lanes, sums);
    });
    if (mask) {
      for (size_t i = 0; i < count * lanes; i += width) {
        write(scores + i, head_.masked(read<Float>(scores + i, All()), read<Float>(mask + i, All())), All());
      }
    }
    hide(begin, end, scores);
    Float decay[vectors];
    soften(scores, count, decay);
    in_pieces<tall>(0, head_.call.value_width, [&](size_t c, auto n) MITTENS_INLINED {
      Float sums[n()][vectors];
      float* into = values_ + c * lanes;
      unrolled<n()>([&](size_t i) MITTENS_INLINED {
        unrolled<vectors>([&](size_t v) MITTENS_INLINED {
          sums[i][v] = read<Float>(into + i * lanes + v * width, All()) * decay[v];
        });
      });
      multiply(values + c, 1, values_stride, scores, count, sums);
      store_sums(into, sums);
    });
  }

  // rows: room for `width` rows of values.
  void end(const Partials& partials, size_t share, float* rows) const {
    const size_t columns = head_.call.value_width;
    const size_t stride = padded_width(columns);
    for (size_t r = 0; r < n_; r += width) {
      for (size_t c = 0; c < columns; c += width) {
        Float v[width];
        for (size_t i = 0; i < width; ++i) {
          v[i] = c + i < columns ? read<Float>(values_ + (c + i) * lanes + r, All()) : Float{};
        }
        transpose(v);
        for (size_t i = 0; i < width; ++i) {
          write(rows + i * stride + c, v[i], All());
        }
      }
      for (size_t i = 0; i < width && r + i < n_; ++i) {
        leave(head_, partials, share, first_ + r + i, state_[r + i], state_[lanes + r + i], rows + i * stride);
      }
    }
  }

 private:
  // Transposes columns of all rows into [columns, lanes]; lanes that are no row get `fill`.
  template <typename Load>
  MITTENS_INLINE void pack(size_t columns, float fill, float* out, const Load& load) const {
    for (size_t r = 0; r < lanes; r += width) {
      for (size_t c = 0; c < columns; c += width) {
        Float v[width];
        for (size_t i = 0; i < width; ++i) {
          v[i] = r + i < n_ ? load(first_ + r + i, c, columns - c) : spread(fill);
        }
        transpose(v);
        for (size_t i = 0; i < width && c + i < columns; ++i) {
          write(out + (c + i) * lanes + r, v[i], All());
        }
      }
    }
  }

  template <size_t n>
  static MITTENS_INLINE void store_sums(float* p, const Float (&sums)[n][vectors]) {
    unrolled<n>([&](size_t i) MITTENS_INLINED {
      unrolled<vectors>([&](size_t v) MITTENS_INLINED { write(p + i * lanes + v * width, sums[i][v], All()); });
    });
  }

  // Hides the keys that are out of a row's own range, where the rows' ranges differ here.
  void hide(size_t begin, size_t end, float* scores) const {
    const Range first = head_.range(first_), last = head_.range(first_ + n_ - 1);
    if (first.end >= end && last.begin <= begin) {
      return;
    }
    float low[lanes], high[lanes];
    for (size_t i = 0; i < lanes; ++i) {
      const Range range = i < n_ ? head_.range(first_ + i) : Range{begin, end};
      low[i] = range.begin > begin ? static_cast<float>(range.begin - begin) : 0.0f;
      high[i] = range.end > begin ? static_cast<float>(range.end - begin) : 0.0f;
    }
    for (size_t j = 0; j < end - begin; ++j) {
      const Float at = spread(static_cast<float>(j));
      for (size_t v = 0; v < lanes; v += width) {
        float* p = scores + j * lanes + v;
        const Float score = at < read<Float>(high + v, All()) ? read<Float>(p, All()) : Float{} - infinity;
        write(p, at >= read<Float>(low + v, All()) ? score : Float{} - infinity, All());
      }
    }
  }

  // Scores become exponentials relative to the new largest score; decay: the factor of the sums so far.
  MITTENS_INLINE void soften(float* scores, size_t count, Float (&decay)[vectors]) const {
    for (size_t v = 0; v < vectors; ++v) {
      float* const column = scores + v * width;
      const Float before = read<Float>(state_ + v * width, All());
      Float max = before;
      for (size_t j = 0; j < count; ++j) {
        max = maximum(read<Float>(column + j * lanes, All()), max);
      }
      const Float shift = max == -infinity ? Float{} : max;
      decay[v] = exp_one<T>(before - shift);
      Float sum = {};
      for (size_t j = 0; j < count; ++j) {
        const Float e = exp_one<T>(read<Float>(column + j * lanes, All()) - shift);
        write(column + j * lanes, e, All());
        sum = sum + e;
      }
      float* const total = state_ + lanes + v * width;
      write(state_ + v * width, max, All());
      write(total, fma(read<Float>(total, All()), decay[v], sum), All());
    }
  }

  const Head<T>& head_;
  size_t first_;
  size_t n_;
  float* queries_;  // [width, lanes], scaled
  float* values_;  // [value_width, lanes]
  float* state_;  // [2, lanes]: the largest score, the sum of exponentials
};

// Rows [first, first + n) and the keys of one share.
template <typename T>
class RowBlock {
 public:
  static constexpr size_t lanes = wide * width;
  static constexpr size_t block_keys = 64;

  RowBlock(const Head<T>& head, size_t first, size_t n) : head_(head), first_(first), n_(n) {}

  void run(Range share, size_t share_index, const Partials& partials) const {
    const Attention& call = head_.call;
    const size_t rows = padded_width(n_);
    const size_t keys_stride = panel_stride(call.width);
    const size_t values_stride = panel_stride(call.value_width);
    const Scratch scratch(rows * (call.width + call.value_width + 2) + width * padded_width(call.value_width) +
                          block_keys * (keys_stride + values_stride + 2 * lanes));
    float* free = scratch.data();
    const auto take = [&](size_t size) {
      float* p = free;
      free += size;
      return p;
    };
    float* const queries = take(rows * call.width);
    float* const values = take(rows * call.value_width);
    float* const state = take(rows * 2);
    float* const finished = take(width * padded_width(call.value_width));
    const Panels panels{take(block_keys * keys_stride), take(block_keys * values_stride), take(block_keys * lanes),
                        take(block_keys * lanes)};
    const auto each_tile = [&](const auto& body) {
      for (size_t r = 0; r < n_; r += lanes) {
        with_tile(r, queries, values, state, body);
      }
    };

    each_tile([](const auto& tile) { tile.start(); });
    const Range seen = head_.range(first_, n_);
    const size_t end = smaller(share.end, seen.end);
    for (size_t begin = share.begin > seen.begin ? share.begin : seen.begin; begin < end; begin += block_keys) {
      const Range block{begin, smaller(begin + block_keys, end)};
      bool widened = false;
      each_tile([&](const auto& tile) { add(tile, block, panels, widened); });
    }
    each_tile([&](const auto& tile) { tile.end(partials, share_index, finished); });
  }

 private:
  struct Panels {
    float* keys;
    float* values;
    float* scores;
    float* mask;
  };

  // Rows of a panel start in different sets of the cache.
  static size_t panel_stride(size_t columns) {
    return ceil_divide(columns, 32) * 32 + 16;
  }

  template <typename Body>
  void with_tile(size_t r, float* queries, float* values, float* state, const Body& body) const {
    const size_t n = smaller(lanes, n_ - r);
    queries += r * head_.call.width;
    values += r * head_.call.value_width;
    state += r * 2;
    switch (ceil_divide(n, width)) {
      case 1:
        return body(RowTile<T, 1>(head_, first_ + r, n, queries, values, state));
      case 2:
        return body(RowTile<T, 2>(head_, first_ + r, n, queries, values, state));
      default:
        return body(RowTile<T, wide>(head_, first_ + r, n, queries, values, state));
    }
  }

  template <typename Tile>
  void add(const Tile& tile, Range block, const Panels& panels, bool& widened) const {
    const Range seen = tile.range();
    const size_t begin = seen.begin > block.begin ? seen.begin : block.begin;
    const size_t end = smaller(seen.end, block.end);
    const bool masked = head_.call.mask.kind != MaskKind::none;
    if (begin >= end || (masked && !tile.pack_mask(begin, end, panels.mask))) {
      return;
    }
    const size_t keys_stride = panel_stride(head_.call.width);
    const size_t values_stride = panel_stride(head_.call.value_width);
    if (!widened) {
      head_.keys.widen(block.begin, block.end - block.begin, panels.keys, keys_stride);
      head_.values.widen(block.begin, block.end - block.begin, panels.values, values_stride);
      widened = true;
    }
    tile.add(panels.keys + (begin - block.begin) * keys_stride, keys_stride,
             panels.values + (begin - block.begin) * values_stride, values_stride, begin, end,
             masked ? panels.mask : nullptr, panels.scores);
  }

  const Head<T>& head_;
  size_t first_;
  size_t n_;
};

}  // namespace mittens::cpu::MITTENS_ISA
