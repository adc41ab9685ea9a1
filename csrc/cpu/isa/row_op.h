// Shared by the row-wise ops: each row is reduced to a few numbers, block by block, then mapped with them.
//
// The order of every sum depends on the shape alone, so results are the same for any number of threads. An op has
//   Stats                                          a few float32
//   Stats reduce(const Block&)
//   Stats merge(Stats, Stats)                      of neighbouring blocks
//   void map(const Block&, Stats row, Stats own)   writes the block's outputs; own: reduce's result for it
//   rows_together                                  rows that one thread maps in order, from a multiple of this number
//   bytes                                          read and written for one element
//   keeps(blocks)                                  whether reduce leaves float32 elements for map in Block::kept
#pragma once

#include "cpu/isa/simd.h"
#include "cpu/parallel.h"

namespace mittens::cpu::MITTENS_ISA {

constexpr size_t column_block = 4096;  // columns that are reduced at once: they stay in the first cache
constexpr size_t piece_bytes = 128 << 10;  // for one thread at a time
constexpr size_t serial_bytes = 256 << 10;  // less than this is done sooner than another thread wakes up
constexpr size_t through_bytes = 4 << 20;  // outputs from here on are not expected to stay in the caches

// Neighbouring columns of one row.
struct Block {
  size_t row;
  size_t begin;  // the first column
  size_t size;
  float* kept;  // whole units, or nullptr
};

MITTENS_INLINE size_t smaller(size_t a, size_t b) {
  return a < b ? a : b;
}

MITTENS_INLINE constexpr size_t ceil_divide(size_t a, size_t b) {
  return a / b + (a % b != 0);
}

MITTENS_INLINE size_t rounded_up(size_t n, size_t multiple) {
  return ceil_divide(n, multiple) * multiple;
}

// In whole units.
MITTENS_INLINE size_t padded(size_t columns) {
  return rounded_up(columns, unit);
}

// In whole vectors.
MITTENS_INLINE size_t padded_width(size_t n) {
  return rounded_up(n, width);
}

// Element i of an array of T.
template <typename T>
MITTENS_INLINE float widen_one(const void* p, size_t i) {
  return load_in_order(static_cast<const T*>(p) + i, Some{1})[0];
}

// Calls f with a value of the element type.
template <typename F>
MITTENS_INLINE void with_type(Type type, const F& f) {
  switch (type) {
    case Type::float32:
      return f(float());
    case Type::float16:
      return f(float16());
    case Type::bfloat16:
      return f(bfloat16());
  }
}

MITTENS_INLINE float inverse_root(float x) {
  return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x)));
}

// Of a sum of squares that rounding may have left just below 0; NaN stays NaN.
MITTENS_INLINE float positive(float x) {
  return x < 0.0f ? 0.0f : x;
}

// Whether an output should be written past the caches: it would not stay in them, and is not there as an input.
MITTENS_INLINE bool passes_caches(size_t bytes, const void* output, const void* input, const void* other = nullptr) {
  return bytes >= through_bytes && output != input && output != other;
}

template <typename Op>
class Rows {
  using Stats = typename Op::Stats;

 public:
  Rows(const Op& op, size_t rows, size_t columns)
      : op_(op), rows_(rows), columns_(columns), blocks_(ceil_divide(columns, column_block)) {}

  void run() const {
    if (rows_ == 0 || columns_ == 0) {
      return;
    }
    const size_t row_bytes = columns_ * Op::bytes;
    const size_t groups = ceil_divide(rows_, Op::rows_together);
    if (rows_ * row_bytes <= serial_bytes || threads() == 1) {
      whole_rows(0, rows_);
    } else if (groups >= 2 * threads() || blocks_ == 1) {
      parallel_for(groups, ceil_divide(piece_bytes, row_bytes * Op::rows_together), [&](size_t begin, size_t end) {
        whole_rows(begin * Op::rows_together, smaller(end * Op::rows_together, rows_));
      });
    } else {
      split_rows(groups);
    }
  }

  // So many rows, by this thread.
  void whole_rows(size_t begin, size_t end) const {
    if (blocks_ == 1) {
      alignas(64) float kept[Op::keeps(1) ? column_block : 1];
      for (size_t row = begin; row < end; ++row) {
        const Block all = block(row, 0, Op::keeps(1) ? kept : nullptr);
        const Stats stats = op_.reduce(all);
        op_.map(all, stats, stats);
      }
    } else {
      const Scratch kept(kept_of_row());
      const Scratch memory(blocks_ * sizeof(Stats) / sizeof(float));
      Stats* stats = reinterpret_cast<Stats*>(memory.data());
      for (size_t row = begin; row < end; ++row) {
        for (size_t i = 0; i < blocks_; ++i) {
          stats[i] = op_.reduce(block(row, i, kept.data()));
        }
        const Stats all = merged(stats, blocks_);
        for (size_t i = 0; i < blocks_; ++i) {
          op_.map(block(row, i, kept.data()), all, stats[i]);
        }
      }
    }
    publish();
  }

 private:
  Block block(size_t row, size_t index, float* kept) const {
    const size_t begin = index * column_block;
    return {row, begin, smaller(column_block, columns_ - begin), kept ? kept + begin : nullptr};
  }

  static Stats merged(const Stats* stats, size_t blocks) {
    Stats all = stats[0];
    for (size_t i = 1; i < blocks; ++i) {
      all = Op::merge(all, stats[i]);
    }
    return all;
  }

  // Few long rows: their blocks are reduced in parallel, then mapped in parallel.
  void split_rows(size_t groups) const {
    const size_t piece = ceil_divide(piece_bytes, column_block * Op::bytes);
    const Scratch kept(rows_ * kept_of_row());
    const Scratch memory(rows_ * (blocks_ + 1) * sizeof(Stats) / sizeof(float));
    Stats* stats = reinterpret_cast<Stats*>(memory.data());
    Stats* all = stats + rows_ * blocks_;
    auto block_of = [&](size_t row, size_t index) {
      return block(row, index, kept.data() ? kept.data() + row * kept_of_row() : nullptr);
    };
    parallel_for(rows_ * blocks_, piece, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        stats[i] = op_.reduce(block_of(i / blocks_, i % blocks_));
      }
    });
    for (size_t row = 0; row < rows_; ++row) {
      all[row] = merged(stats + row * blocks_, blocks_);
    }
    parallel_for(groups * blocks_, piece, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        const size_t first = i / blocks_ * Op::rows_together, index = i % blocks_;
        for (size_t row = first; row < smaller(first + Op::rows_together, rows_); ++row) {
          op_.map(block_of(row, index), all[row], stats[row * blocks_ + index]);
        }
      }
      publish();
    });
  }

  size_t kept_of_row() const {
    return Op::keeps(blocks_) ? blocks_ * column_block : 0;
  }

  const Op& op_;
  size_t rows_;
  size_t columns_;
  size_t blocks_;  // of one row
};

}  // namespace mittens::cpu::MITTENS_ISA
