// A token of the heads of a layer: each head's memory and rows of the state, and all heads side by side.
#pragma once

#include "cpu/isa/recurrence/over_steps.h"

namespace mittens::cpu::MITTENS_ISA {

// The memory of a head: vectors padded to whole ones.
struct HeadMemory {
  float* keys;
  float* queries;
  float* state;  // some rows
  float* values;
  float* results;
  float* gates;  // of columns
  float* weights;  // of the convolution

  HeadMemory(float* memory, size_t rows, size_t columns)
      : keys(memory),
        queries(keys + padded_width(columns)),
        state(queries + padded_width(columns)),
        values(state + rows_at_once * padded_width(columns)),
        results(values + padded_width(rows)),
        gates(results + padded_width(rows)),
        weights(gates + padded_width(columns)) {}

  static size_t numbers(size_t rows, size_t columns, size_t taps) {
    const size_t r = padded_width(rows), c = padded_width(columns);
    return (3 + rows_at_once) * c + 2 * r + 2 * taps * (c > r ? c : r);
  }
};

// Advances the rows of a head, [rows, columns] before and after, which may be the same.
MITTENS_INLINE void advance_head(const float* before, float* after, size_t rows, size_t columns, const Step& step,
                                 const HeadMemory& memory) {
  const size_t stride = padded_width(columns);
  float* s = memory.state;
  for (size_t r = 0; r < rows; r += rows_at_once) {
    const size_t some = smaller(rows_at_once, rows - r);
    const float* values = memory.values + r;
    float* results = memory.results + r;
    for (size_t i = 0; i < some; ++i) {
      read_row(before + (r + i) * columns, columns, s + i * stride);
    }
    float predicted[rows_at_once], update[rows_at_once];
    if (some == rows_at_once) {
      advance<rows_at_once>(s, stride, step, values, predicted, update, results);
    } else {
      for (size_t i = 0; i < some; ++i) {
        advance<1>(s + i * stride, stride, step, values + i, predicted, update, results + i);
      }
    }
    for (size_t i = 0; i < some; ++i) {
      write_row(after + (r + i) * columns, columns, s + i * stride);
    }
  }
}

// Calls of_head(sequence, head, memory) for each head, with memory of its own.
template <typename OfHead>
void each_head(size_t batch, size_t heads, size_t work, size_t numbers, const OfHead& of_head) {
  const size_t grain = work == 0 ? 1 : ceil_divide(work_of_piece, work);
  parallel_for(batch * heads, grain, [&](size_t begin, size_t end) {
    const Scratch memory(numbers);
    for (size_t i = begin; i < end; ++i) {
      of_head(i / heads, i % heads, memory.data());
    }
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
