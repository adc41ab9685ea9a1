// A step of a recurrence on a few rows of the state, which are padded to whole vectors with zeros.
#pragma once

#include "cpu/isa/row_op.h"
#include "cpu/recurrence/recurrence.h"

namespace mittens::cpu::MITTENS_ISA {

constexpr int rows_at_once = 4;  // that share loads of keys and queries

MITTENS_INLINE void clear(float* p, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    p[i] = 0;
  }
}

// The elements as float32; zeros up to whole vectors.
template <typename T>
MITTENS_INLINE void widened(const T* p, size_t n, float* out) {
  each_vector(n, [&](size_t i, auto part) MITTENS_INLINED { write(out + i, load_in_order(p + i, part), All()); });
}

// One number of an array.
MITTENS_INLINE float number(Type type, const void* p, size_t i) {
  float v = 0;
  with_type(type, [&](auto t) MITTENS_INLINED { v = widen_one<decltype(t)>(p, i); });
  return v;
}

// One step's numbers, the same for all rows of a head.
struct Step {
  const float* k;  // [stride]
  const float* q;
  const float* gates;  // [stride], or nullptr: `gate`
  float gate;
  float rate;
  bool corrects;

  MITTENS_INLINE Float gate_at(size_t column) const {
    return gates ? read<Float>(gates + column, All()) : Float{} + gate;
  }
};

// Advances R rows [R, stride] by a step. `update` gets the factor of k for each row, `predicted` the state's value for
// k, and `y` the result if it is asked for.
template <int R>
MITTENS_INLINE void advance(float* s, size_t stride, const Step& step, const float* v, float* predicted, float* update,
                            float* y) {
  Float sums[R] = {};
  for (size_t i = 0; step.corrects && i < stride; i += width) {
    const Float k = read<Float>(step.k + i, All()), gate = step.gate_at(i);
    for (int r = 0; r < R; ++r) {
      sums[r] = fma(read<Float>(s + r * stride + i, All()) * gate, k, sums[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    predicted[r] = step.corrects ? total(sums[r]) : 0.0f;
    update[r] = step.rate * (v[r] - predicted[r]);
  }
  Float results[R] = {};
  for (size_t i = 0; i < stride; i += width) {
    const Float k = read<Float>(step.k + i, All()), gate = step.gate_at(i), q = read<Float>(step.q + i, All());
    for (int r = 0; r < R; ++r) {
      const Float state = fma(k, Float{} + update[r], read<Float>(s + r * stride + i, All()) * gate);
      write(s + r * stride + i, state, All());
      results[r] = fma(state, q, results[r]);
    }
  }
  for (int r = 0; y && r < R; ++r) {
    y[r] = total(results[r]);
  }
}

// A row [columns] of a state that is read or written as it lies in memory.
MITTENS_INLINE void read_row(const float* p, size_t columns, float* row) {
  each_vector(columns, [&](size_t i, auto part) MITTENS_INLINED { write(row + i, read<Float>(p + i, part), All()); });
}
MITTENS_INLINE void write_row(float* p, size_t columns, const float* row) {
  each_vector(columns, [&](size_t i, auto part) MITTENS_INLINED { write(p + i, read<Float>(row + i, All()), part); });
}

}  // namespace mittens::cpu::MITTENS_ISA
