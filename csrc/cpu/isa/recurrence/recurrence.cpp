#include "cpu/recurrence.h"

#include "cpu/isa/recurrence/recurrence_rows.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

constexpr size_t rows_of_task = 32;  // of a head, by one thread over all steps
constexpr size_t work_of_piece = 64 << 10;  // elements of the state, times steps

template <typename T>
void rows_over_steps(const Recurrence& shape, const RecurrenceInputs& inputs, size_t sequence, size_t head,
                     size_t first_row, size_t rows, T* y, float* state, float* memory) {
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
    if (inputs.state) {
      read_row(inputs.state + state_at + r * columns, columns, s + r * stride);
    } else {
      clear(s + r * stride, stride);
    }
  }
  for (size_t t = 0; t < shape.steps; ++t) {
    const size_t at = sequence * shape.steps + t;
    T* result = y + (at * shape.heads + head) * shape.rows + first_row;
    if (inputs.mask && !inputs.mask[at]) {
      each_vector(rows, [&](size_t i, auto part) MITTENS_INLINED { store_in_order(result + i, Float{}, part); });
      continue;
    }
    const size_t key_at = (at * shape.key_heads + key_head) * columns;
    const size_t gate_at = at * shape.heads + head;
    widened((const T*)inputs.k + key_at, columns, k);
    widened((const T*)inputs.q + key_at, columns, q);
    widened((const T*)inputs.v + (at * shape.heads + head) * shape.rows + first_row, rows, values);
    if (shape.gate_per_column) {
      read_row(inputs.gates + gate_at * columns, columns, gates);
    }
    const Step step{k,
                    q,
                    shape.gate_per_column ? gates : nullptr,
                    shape.gate_per_column ? 0.0f : inputs.gates[gate_at],
                    number(inputs.rate_type, inputs.rates, gate_at),
                    shape.corrects};
    float predicted[rows_at_once], update[rows_at_once];
    size_t r = 0;
    for (; r + rows_at_once <= rows; r += rows_at_once) {
      advance<rows_at_once>(s + r * stride, stride, step, values + r, predicted, update, results + r);
    }
    for (; r < rows; ++r) {
      advance<1>(s + r * stride, stride, step, values + r, predicted, update, results + r);
    }
    each_vector(rows, [&](size_t i, auto part)
                          MITTENS_INLINED { store_in_order(result + i, read<Float>(results + i, All()), part); });
  }
  for (size_t r = 0; r < rows; ++r) {
    write_row(state + state_at + r * columns, columns, s + r * stride);
  }
}

}  // namespace

void recurrence(Type type, const Recurrence& shape, const RecurrenceInputs& inputs, void* y, float* state) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const size_t blocks = ceil_divide(shape.rows, rows_of_task);
    const size_t work = smaller(shape.rows, rows_of_task) * shape.columns * shape.steps;
    const size_t grain = work == 0 ? 1 : ceil_divide(work_of_piece, work);  // a compiled function may meet sizes of 0
    parallel_for(shape.batch * shape.heads * blocks, grain, [&](size_t begin, size_t end) {
      const size_t stride = padded_width(shape.columns);
      const Scratch memory((rows_of_task + 3) * stride + 2 * padded_width(rows_of_task));
      for (size_t task = begin; task < end; ++task) {
        const size_t head = task / blocks, first_row = task % blocks * rows_of_task;
        rows_over_steps(shape, inputs, head / shape.heads, head % shape.heads, first_row,
                        smaller(rows_of_task, shape.rows - first_row), (T*)y, state, memory.data());
      }
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
