// The steps of metal/sampling/adjust.h.
#include "cpu/sampling/adjust_logits.h"

#include "cpu/isa/row_op.h"
#include "cpu/isa/sampling/rounding.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

constexpr uint32_t is_repeated = 1, is_present = 2, one_occurrence = 4;

template <typename T>
struct Adjuster {
  const T* x;
  T* y;
  uint32_t* counts;
  size_t columns;
  const Adjustment& given;

  static float penalty_of(const LogitPenalty& penalty, size_t row) {
    return penalty.numbers ? round_one<T>(penalty.numbers[row * penalty.step]) : penalty.value;
  }

  const uint32_t* mask_of(size_t row) const {
    return given.mask ? given.mask + row * given.mask_step : nullptr;
  }

  // From a column that begins a word of the mask on.
  void copy(size_t row, size_t begin, size_t end) const {
    const T* from = x + row * columns;
    T* to = y + row * columns;
    const uint32_t* mask = mask_of(row);
    if (!mask) {
      __builtin_memcpy(to + begin, from + begin, (end - begin) * sizeof(T));
      return;
    }
    T nothing;
    store_one(&nothing, -infinity);
    for (size_t i = begin; i < end; i += 32) {
      const uint32_t allowed = mask[i / 32];
      const size_t size = smaller(32, end - i);
      if (allowed == 0xffffffff) {
        __builtin_memcpy(to + i, from + i, size * sizeof(T));
        continue;
      }
      for (size_t j = 0; j < size; ++j) {
        to[i + j] = allowed >> j & 1 ? from[i + j] : nothing;
      }
    }
  }

  template <typename F>
  void each_token(size_t row, const F& f) const {
    const size_t longest = largest(largest(given.repetition.context, given.presence.context), given.frequency.context);
    const uint32_t* tokens = given.tokens + row * given.token_step * given.words;
    for (size_t i = given.count - smaller(longest, given.count); i < given.count; ++i) {
      const uint32_t* token = tokens + i * given.words;
      if (token[0] < columns && (given.words == 1 || token[1] == 0)) {
        f(token[0], given.count - i);
      }
    }
  }

  static size_t largest(size_t a, size_t b) {
    return a > b ? a : b;
  }

  float penalized(float v, uint32_t count, size_t row) const {
    const LogitPenalty& repetition = given.repetition;
    if (count & is_repeated && !(repetition.numbers && repetition.numbers[row * repetition.step] == 0)) {
      const float penalty = penalty_of(repetition, row);
      v = round_one<T>(v < 0 ? v * penalty : v / penalty);
    }
    if (count & is_present) {
      v = round_one<T>(v - penalty_of(given.presence, row));
    }
    const float penalty = count >= one_occurrence ? penalty_of(given.frequency, row) : 0;
    for (uint32_t i = one_occurrence; i <= count; i += one_occurrence) {
      v = round_one<T>(v - penalty);
    }
    return v;
  }

  void penalize(size_t row) const {
    uint32_t* counted = counts + row * columns;
    each_token(row, [&](uint32_t column, size_t) { counted[column] = 0; });
    each_token(row, [&](uint32_t column, size_t age) {
      counted[column] += age <= given.frequency.context ? one_occurrence : 0;
      counted[column] |=
          (age <= given.repetition.context ? is_repeated : 0) | (age <= given.presence.context ? is_present : 0);
    });
    const uint32_t* mask = mask_of(row);
    each_token(row, [&](uint32_t column, size_t) {
      const bool is_allowed = !mask || mask[column / 32] >> column % 32 & 1;
      if (counted[column] > 0 && is_allowed) {
        store_one(y + row * columns + column, penalized(widen_one<T>(x, row * columns + column), counted[column], row));
      }
      counted[column] = 0;
    });
  }
};

}  // namespace

void adjust_logits(Type type, const void* x, void* y, uint32_t* counts, size_t rows, size_t columns,
                   const Adjustment& adjustment) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const Adjuster<T> adjuster{(const T*)x, (T*)y, counts, columns, adjustment};
    constexpr size_t piece = 8 * column_block;  // of a row, for one thread at a time
    const size_t pieces = ceil_divide(columns, piece);
    const size_t grain = rows * columns * sizeof(T) <= serial_bytes ? rows * pieces : 1;
    parallel_for(rows * pieces, grain, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        const size_t from = i % pieces * piece;
        adjuster.copy(i / pieces, from, smaller(from + piece, columns));
      }
    });
    if (adjustment.tokens) {
      parallel_for(rows, rows * adjustment.count <= piece ? rows : 1, [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row) {
          adjuster.penalize(row);
        }
      });
    }
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
