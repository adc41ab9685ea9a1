// A few rows at a time, as in decoding: lanes run along a key, so that keys and values are widened in registers on
// their way from memory, once for several rows.
#pragma once

#include "cpu/isa/attention/attention_state.h"

namespace mittens::cpu::MITTENS_ISA {

// Sums that are in registers at once: of each of `rows` rows with sums_at_once / rows keys.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr size_t sums_at_once = 16;
#else
constexpr size_t sums_at_once = 8;
#endif

// Keys or values that have been widened to float32, in whole vectors, from one on; or none.
struct WideRows {
  const float* data = nullptr;
  size_t first = 0;
};

// Some rows of a head, and the keys of one share. Keys and values may have been widened before; the results are the
// same, bit for bit.
template <typename T>
class FewRows {
 public:
  static constexpr size_t block_keys = 64;
  static constexpr size_t panel_keys = 16;  // widened at once, where that is not done in registers

  FewRows(const Head<T>& head, size_t first, size_t rows, WideRows wide_keys = {}, WideRows wide_values = {})
      : head_(head),
        wide_keys_(wide_keys),
        wide_values_(wide_values),
        first_(first),
        rows_(rows),
        columns_(padded_width(head.call.width)),
        value_columns_(padded_width(head.call.value_width)) {}

  void run(Range share, size_t share_index, const Partials& partials) const {
    const Scratch scratch(rows_ * (columns_ + value_columns_ + block_keys + 3 * width) +
                          panel_keys * (columns_ > value_columns_ ? columns_ : value_columns_));
    float* const queries = scratch.data();
    float* const values = queries + rows_ * columns_;
    float* const scores = values + rows_ * value_columns_;
    float* const state = scores + rows_ * block_keys;  // each row's largest score, sum, and how the sums decay
    float* const panel = state + rows_ * 3 * width;

    start(queries, values, state);
    const Range seen = head_.range(first_, rows_);
    const size_t end = smaller(share.end, seen.end);
    for (size_t begin = share.begin > seen.begin ? share.begin : seen.begin; begin < end; begin += block_keys) {
      const size_t n = smaller(block_keys, end - begin);
      const auto take_keys = [&](size_t j, size_t m, const auto* rows, int64_t stride) {
        multiply_keys(queries, rows, stride, m, scores + j,
                      [&](size_t i) MITTENS_INLINED { prefetch(head_.values, wide_values_, begin + j + i); });
      };
      const auto take_values = [&](size_t j, size_t m, const auto* rows, int64_t stride) {
        add_values(scores + j, state, rows, stride, m, values,
                   [&](size_t i) MITTENS_INLINED { prefetch(head_.keys, wide_keys_, begin + block_keys + j + i); });
        for (size_t r = 0; r < rows_; ++r) {
          state[3 * r + 2] = 1.0f;
        }
      };
      in_reach(head_.keys, wide_keys_, columns_, begin, n, panel, take_keys);
      soften(begin, n, scores, state);
      in_reach(head_.values, wide_values_, value_columns_, begin, n, panel, take_values);
    }
    for (size_t r = 0; r < rows_; ++r) {
      leave(head_, partials, share_index, first_ + r, state[3 * r], state[3 * r + 1], values + r * value_columns_);
    }
  }

 private:
  // Calls body(j, m, rows, stride) with rows [begin + j, begin + j + m) that vectors can be loaded from.
  template <typename Body>
  void in_reach(const HeadRows<T>& rows, WideRows wide, size_t columns, size_t begin, size_t n, float* panel,
                const Body& body) const {
    if (wide.data) {
      return body(0, n, wide.data + (begin - wide.first) * columns, static_cast<int64_t>(columns));
    }
    for (size_t j = 0, m; j < n; j += m) {
      m = rows.whole() ? rows.together(begin + j, n - j) : 0;
      m = j + m < n ? m / panel_keys * panel_keys : m;  // the body writes whole panels of scores
      if (m > 0) {
        body(j, m, rows.row(begin + j), rows.stride());
      } else {
        m = smaller(panel_keys, n - j);
        rows.widen(begin + j, m, panel, columns);
        body(j, m, panel, static_cast<int64_t>(columns));
      }
    }
  }

  static MITTENS_INLINE void prefetch(const HeadRows<T>& rows, WideRows wide, size_t i) {
    if (!wide.data) {
      rows.prefetch(i);
    }
  }

  void start(float* queries, float* values, float* state) const {
    const size_t columns = head_.call.width;
    const Float scale = spread(head_.call.scale);
    for (size_t r = 0; r < rows_; ++r) {
      const T* query = head_.query(first_ + r);
      for (size_t c = 0; c < columns; c += width) {
        const Float q = c + width <= columns ? load_one(query + c) : load_one(query + c, Some{columns - c});
        write(queries + r * columns_ + c, q * scale, All());
      }
      state[3 * r] = -infinity;
      state[3 * r + 1] = 0.0f;
    }
    for (size_t i = 0; i < rows_ * value_columns_; i += width) {
      write(values + i, Float{}, All());
    }
  }

  // scores[row][key] = queries[row] . keys[key]
  template <typename S, typename Ahead>
  void multiply_keys(const float* queries, const S* keys, int64_t stride, size_t n, float* scores,
                     const Ahead& ahead) const {
    in_pieces<4>(0, rows_, [&](size_t r, auto rows) MITTENS_INLINED {
      constexpr size_t keys_at_once = sums_at_once / rows();
      const float* const q = queries + r * columns_;
      for (size_t j = 0; j < n; j += keys_at_once) {
        const S* key[keys_at_once];
        for (size_t i = 0; i < keys_at_once; ++i) {
          key[i] = keys + static_cast<int64_t>(smaller(j + i, n - 1)) * stride;
          if (r == 0) {
            ahead(smaller(j + i, n - 1));
          }
        }
        Float sums[rows()][keys_at_once] = {};
        for (size_t c = 0; c < columns_; c += width) {
          Float query[rows()];
          unrolled<rows()>([&](size_t i) MITTENS_INLINED { query[i] = read<Float>(q + i * columns_ + c, All()); });
          unrolled<keys_at_once>([&](size_t k) MITTENS_INLINED {
            const Float x = load_one(key[k] + c);
            unrolled<rows()>([&](size_t i) MITTENS_INLINED { sums[i][k] = fma(query[i], x, sums[i][k]); });
          });
        }
        store_scores(sums, scores + r * block_keys + j);
      }
    });
  }

  template <size_t rows, size_t keys>
  static MITTENS_INLINE void store_scores(const Float (&sums)[rows][keys], float* scores) {
    constexpr size_t piece = keys < width ? keys : width;
#pragma GCC unroll 4
    for (size_t start = 0; start < rows * keys; start += width) {
      Float v[width];
      unrolled<width>([&](size_t i) MITTENS_INLINED { v[i] = sums[(start + i) / keys][(start + i) % keys]; });
      const Float totals = sum_each(v);
#pragma GCC unroll 4
      for (size_t i = 0; i < width; i += piece) {
        __builtin_memcpy(scores + (start + i) / keys * block_keys + (start + i) % keys,
                         reinterpret_cast<const float*>(&totals) + i, piece * sizeof(float));
      }
    }
  }

  // Scores become exponentials relative to the new largest score.
  void soften(size_t begin, size_t n, float* scores, float* state) const {
    const bool masked = head_.call.mask.kind != MaskKind::none;
    Int lane;
    for (size_t i = 0; i < width; ++i) {
      lane[i] = static_cast<int32_t>(i);
    }
    for (size_t r = 0; r < rows_; ++r, scores += block_keys, state += 3) {
      const Range seen = head_.range(first_ + r);
      const int32_t low = static_cast<int32_t>(seen.begin > begin ? smaller(seen.begin - begin, n) : 0);
      const int32_t high = static_cast<int32_t>(seen.end > begin ? smaller(seen.end - begin, n) : 0);
      Float most = Float{} - infinity;
      for (size_t j = 0; j < n; j += width) {
        Float s = read<Float>(scores + j, All());
        if (masked) {
          s = head_.masked(s, head_.mask(first_ + r, begin + j, n - j));
        }
        const Int at = lane + static_cast<int32_t>(j);
        s = at < high ? s : Float{} - infinity;
        s = at >= low ? s : Float{} - infinity;
        write(scores + j, s, All());
        most = maximum(s, most);
      }
      const float block_max = maximum_of(most);
      const float max = block_max > state[0] ? block_max : state[0];
      const float shift = max == -infinity ? 0.0f : max;
      const Float shifts = spread(shift);
      Float sum = {};
      for (size_t j = 0; j < n; j += width) {
        const Float e = exp_one<T>(read<Float>(scores + j, All()) - shifts);
        write(scores + j, e, All());
        sum = sum + e;
      }
      state[2] = exp_one<T>(spread(state[0]) - shifts)[0];
      state[1] = state[1] * state[2] + sum_of(sum);
      state[0] = max;
    }
  }

  // values[row] = decay[row] * values[row] + sum of scores[row][key] * rows[key]
  template <typename S, typename Ahead>
  void add_values(const float* scores, const float* state, const S* rows, int64_t stride, size_t n, float* values,
                  const Ahead& ahead) const {
    in_pieces<4>(0, rows_, [&](size_t r, auto count) MITTENS_INLINED {
      in_pieces<4>(0, value_columns_ / width, [&](size_t c, auto vectors) MITTENS_INLINED {
        float* const into = values + r * value_columns_ + c * width;
        const float* const weights = scores + r * block_keys;
        Float sums[count()][vectors()];
        unrolled<count()>([&](size_t i) MITTENS_INLINED {
          unrolled<vectors()>([&](size_t v) MITTENS_INLINED {
            sums[i][v] = read<Float>(into + i * value_columns_ + v * width, All()) * state[3 * (r + i) + 2];
          });
        });
        const S* p = rows + c * width;
        const bool first = r == 0 && c == 0;
        for (size_t j = 0; j < n; ++j, p += stride) {
          if (first) {
            ahead(j);
          }
          Float x[vectors()];
          unrolled<vectors()>([&](size_t v) MITTENS_INLINED { x[v] = load_one(p + v * width); });
          unrolled<count()>([&](size_t i) MITTENS_INLINED {
            const Float weight = spread(weights[i * block_keys + j]);
            unrolled<vectors()>([&](size_t v) MITTENS_INLINED { sums[i][v] = fma(weight, x[v], sums[i][v]); });
          });
        }
        unrolled<count()>([&](size_t i) MITTENS_INLINED {
          unrolled<vectors()>([&](size_t v)
                                  MITTENS_INLINED { write(into + i * value_columns_ + v * width, sums[i][v], All()); });
        });
      });
    });
  }

  const Head<T>& head_;
  WideRows wide_keys_;
  WideRows wide_values_;
  size_t first_;
  size_t rows_;
  size_t columns_;  // in whole vectors
  size_t value_columns_;
};

}  // namespace mittens::cpu::MITTENS_ISA
