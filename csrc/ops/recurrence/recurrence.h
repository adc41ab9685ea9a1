// Linear recurrences: a state S [rows, columns] for each head of each sequence, and for each step
//
//   S = S * gate;   S += rate (v - S k) k^T   or, without the delta rule,   S += rate v k^T;   y = S q
#pragma once

#include "runtime/primitive.h"

namespace mittens {

struct RecurrenceOptions {
  bool delta_rule;
  bool has_state;  // else it begins with zeros
  bool has_mask;

  bool operator==(const RecurrenceOptions&) const = default;
};

// q, k [batch, steps, key_heads, columns], v [batch, steps, heads, rows] of one dtype, gates [batch, steps, heads] or
// [batch, steps, heads, columns] in float32, rates [batch, steps, heads] in that dtype or float32, the state [batch,
// heads, rows, columns] in float32, and a mask [batch, steps] of booleans -> y, of v's shape, and the last state.
Arrays recurrence_composed(const Arrays& inputs, const RecurrenceOptions& options, mx::Stream stream);

// The gradients of these inputs by native code, for the cotangents of y and of the last state; zeros of the mask.
Arrays recurrence_vjp(const Arrays& inputs, const Arrays& cotangents, const RecurrenceOptions& options,
                      mx::Stream stream);

// For the native code: the sizes, and what it reads.
struct RecurrenceArrays {
  const mx::array &q, &k, &v, &gates, &rates;
  const mx::array *state, *mask;

  RecurrenceArrays(const Arrays& inputs, const RecurrenceOptions& options)
      : q(inputs[0]),
        k(inputs[1]),
        v(inputs[2]),
        gates(inputs[3]),
        rates(inputs[4]),
        state(options.has_state ? &inputs[5] : nullptr),
        mask(options.has_mask ? &inputs[options.has_state ? 6 : 5] : nullptr) {}
};

}  // namespace mittens
