// The steps of a recurrence over all states, wherever its gates and rates come from.
#pragma once

#include "cpu/isa/recurrence/recurrence_rows.h"

namespace mittens::cpu::MITTENS_ISA {

constexpr size_t rows_of_task = 32;  // of a head, by one thread over all steps
constexpr size_t work_of_piece = 64 << 10;  // elements of the state, times steps

template <typename T>
struct Sequences {
  const Recurrence& shape;
  const T* q;  // [batch, steps, key_heads, columns]
  const T* k;  // [batch, steps, key_heads, columns]
  const T* v;  // [batch, steps, heads, rows]
  const float* state_in;  // [batch, heads, rows, columns] or nullptr: zeros
  const bool* mask;  // [batch, steps] or nullptr
  float* state;  // [batch, heads, rows, columns]
};

// Some rows of a head. `numbers` has step(): the numbers of one, and write_y().
template <typename T, typename HeadNumbers>
void rows_over_steps(const Sequences<T>& all, const HeadNumbers& numbers, size_t sequence, size_t head,
                     size_t first_row, size_t rows, float* memory) {
  const Recurrence& shape = all.shape;
  const size_t columns = shape.columns, stride = padded_width(columns);
  const size_t key_head = head / (shape.heads / shape.key_heads);
  float* s = memory;
  float* k = s + rows_of_task * stride;
  float* q = k + stride;
  float* gates = q + stride;
  float* values = gates + stride;
  float* results = values + padded_width(rows_of_task);
  const size_t state_at = ((sequence * shape.heads + head) * shape.rows + first_row) * columns;
  for (size_t r = 0; r < rows; ++r) {
    if (all.state_in) {
      read_row(all.state_in + state_at + r * columns, columns, s + r * stride);
    } else {
      clear(s + r * stride, stride);
    }
  }
  for (size_t t = 0; t < shape.steps; ++t) {
    const size_t at = sequence * shape.steps + t;
    const size_t value_at = (at * shape.heads + head) * shape.rows + first_row;
    if (all.mask && !all.mask[at]) {
      numbers.write_y(value_at, rows, nullptr, all.v);
      continue;
    }
    const size_t key_at = (at * shape.key_heads + key_head) * columns;
    widened(all.k + key_at, columns, k);
    widened(all.q + key_at, columns, q);
    widened(all.v + value_at, rows, values);
    const Step step = numbers.step(at, k, q, gates);
    float predicted[rows_at_once], update[rows_at_once];
    size_t r = 0;
    for (; r + rows_at_once <= rows; r += rows_at_once) {
      advance<rows_at_once>(s + r * stride, stride, step, values + r, predicted, update, results + r);
    }
    for (; r < rows; ++r) {
      advance<1>(s + r * stride, stride, step, values + r, predicted, update, results + r);
    }
    numbers.write_y(value_at, rows, results, all.v);
  }
  for (size_t r = 0; r < rows; ++r) {
    write_row(all.state + state_at + r * columns, columns, s + r * stride);
  }
}

// numbers_of(head) makes the numbers of a head.
template <typename T, typename NumbersOf>
void over_steps(const Sequences<T>& all, const NumbersOf& numbers_of) {
  const Recurrence& shape = all.shape;
  const size_t blocks = ceil_divide(shape.rows, rows_of_task);
  const size_t work = smaller(shape.rows, rows_of_task) * shape.columns * shape.steps;
  const size_t grain = work == 0 ? 1 : ceil_divide(work_of_piece, work);  // a compiled function may meet sizes of 0
  parallel_for(shape.batch * shape.heads * blocks, grain, [&](size_t begin, size_t end) {
    const size_t stride = padded_width(shape.columns);
    const Scratch memory((rows_of_task + 3) * stride + 2 * padded_width(rows_of_task));
    for (size_t task = begin; task < end; ++task) {
      const size_t head = task / blocks % shape.heads, first_row = task % blocks * rows_of_task;
      rows_over_steps(all, numbers_of(head), task / blocks / shape.heads, head, first_row,
                      smaller(rows_of_task, shape.rows - first_row), memory.data());
    }
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
