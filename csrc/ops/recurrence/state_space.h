// A state space: a state S [rows, columns] for each head of each sequence, and for each step
//
//   step = clip(log(1 + e^(dt + dt_bias)), least, greatest)
//   S = S * e^(-step e^A_log);   S += step x B^T;   y = S C + D x
#pragma once

#include "ops/recurrence/recurrence.h"

namespace mittens {

struct StateSpaceOptions {
  bool has_state;  // else it begins with zeros
  bool has_mask;
  float least_step;
  float greatest_step;

  bool operator==(const StateSpaceOptions&) const = default;
};

// x [batch, steps, heads, rows], A_log [heads], B and C [batch, steps, groups, columns], D [heads], dt [batch, steps,
// heads], dt_bias [heads], the state [batch, heads, rows, columns] in float32, and a mask [batch, steps] of booleans.
// x, B and C are of one dtype; A_log, D, dt and dt_bias are each of any of the kernels' dtypes.
struct StateSpaceArrays {
  const mx::array &x, &a_log, &b, &c, &d, &dt, &dt_bias;
  const mx::array *state, *mask;

  StateSpaceArrays(const Arrays& inputs, const StateSpaceOptions& options)
      : x(inputs[0]),
        a_log(inputs[1]),
        b(inputs[2]),
        c(inputs[3]),
        d(inputs[4]),
        dt(inputs[5]),
        dt_bias(inputs[6]),
        state(options.has_state ? &inputs[7] : nullptr),
        mask(options.has_mask ? &inputs[options.has_state ? 8 : 7] : nullptr) {}

  cpu::Recurrence native_sizes() const {
    return native_recurrence(c, x, false, false);
  }
  mx::Shape state_shape() const {
    return {x.shape(0), x.shape(2), x.shape(3), b.shape(3)};
  }
};

// y, of x's shape and of the dtype that x and D promote to, and the last state, in float32: by a kernel or native code.
Arrays state_space(const Arrays& inputs, const StateSpaceOptions& options, mx::Stream stream);

// The same by products of matrices.
Arrays state_space_composed(const Arrays& inputs, const StateSpaceOptions& options, mx::Stream stream);

}  // namespace mittens
