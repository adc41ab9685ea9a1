// The gated delta rule: a state S [rows, columns] for each head of each sequence, and for each step
//
//   S = S * gate;   S += rate (v - S k) k^T;   y = S q
//
// State spaces do not correct: S += rate v k^T.
#pragma once

#include <optional>

#include "cpu/recurrence/recurrence.h"
#include "runtime/cpu_types.h"
#include "runtime/primitive.h"

namespace mittens {

struct RecurrenceOptions {
  bool has_state;  // else it begins with zeros
  bool has_mask;
  bool corrects;  // whether the state's value for k is subtracted from v

  bool operator==(const RecurrenceOptions&) const = default;
};

// Throw unless they are [batch, steps, key heads, columns] twice and [batch, steps, heads, rows], the heads a multiple
// of the key heads.
void check_queries_keys_values(const char* op, const mx::array& q, const mx::array& k, const mx::array& v);

// Whether mx is to compute a call, for the reason given, if any, or since a GPU has no kernel for the columns; said so
// in mm.stats().
bool goes_to_mx(const char* op, mx::Dtype dtype, const cpu::Recurrence& sizes, const char* why_mx, mx::Stream stream);

// q, k [batch, steps, key_heads, columns], v [batch, steps, heads, rows] of one dtype, gates [batch, steps, heads] or
// [batch, steps, heads, columns] in float32, rates [batch, steps, heads] in any of the kernels' types, the state
// [batch, heads, rows, columns] in float32, and a mask [batch, steps] of booleans -> y, of v's shape, and the last
// state, by a kernel or native code that corrects.
Arrays recurrence(const Arrays& inputs, const RecurrenceOptions& options, mx::Stream stream);

// The same by products of matrices, y in float32.
Arrays recurrence_composed(const Arrays& inputs, const RecurrenceOptions& options, mx::Stream stream);

// The gradients of these inputs by native code, for the cotangents of y and of the last state; zeros of the mask.
Arrays recurrence_vjp(const Arrays& inputs, const Arrays& cotangents, const RecurrenceOptions& options,
                      mx::Stream stream);

// Its sizes, by the shapes of queries and values.
inline cpu::Recurrence native_recurrence(const mx::array& q, const mx::array& v, bool gate_per_column, bool corrects) {
  const auto size = [](const mx::array& a, int axis) { return static_cast<size_t>(a.shape(axis)); };
  return {size(q, 0), size(q, 1), size(v, 2), size(q, 2), size(v, 3), size(q, 3), gate_per_column, corrects};
}

// The inputs by name.
struct RecurrenceArrays {
  const mx::array &q, &k, &v, &gates, &rates;
  const mx::array *state, *mask;
  bool corrects;

  RecurrenceArrays(const Arrays& inputs, const RecurrenceOptions& options)
      : q(inputs[0]),
        k(inputs[1]),
        v(inputs[2]),
        gates(inputs[3]),
        rates(inputs[4]),
        state(options.has_state ? &inputs[5] : nullptr),
        mask(options.has_mask ? &inputs[options.has_state ? 6 : 5] : nullptr),
        corrects(options.corrects) {}

  bool gate_per_column() const {
    return gates.ndim() == 4;
  }
  cpu::Recurrence native_sizes() const {
    return native_recurrence(q, v, gate_per_column(), corrects);
  }
  cpu::RecurrenceInputs native_inputs() const {
    return {data_of(q),
            data_of(k),
            data_of(v),
            gates.data<float>(),
            data_of(rates),
            native_type(rates.dtype()),
            state ? state->data<float>() : nullptr,
            mask ? mask->data<bool>() : nullptr};
  }
};

}  // namespace mittens
