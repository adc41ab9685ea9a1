// The inputs of a recurrence, from the projections of all steps of a prompt, by one kernel or native code: a
// convolution with SiLU in three parts of its channels, which may be normalized, its next state, gates and rates.
#pragma once

#include <optional>
#include <vector>

#include "runtime/primitive.h"

namespace mittens {

struct LayerInputsOptions {
  size_t views;  // of the inputs: three, or one that has all channels
  size_t states;  // of the convolution: none, one of all channels, or three
  size_t weights;  // one or three
  bool has_bias;
  bool has_gates;
  bool has_mask;
  bool has_lengths;
  int inner;  // channels of the first part, where one view has all
  float key_eps;  // added to the sums of squares of the first two parts, where there are gates

  bool operator==(const LayerInputsOptions&) const = default;
};

// Throws unless B and C have one size behind the first `inner` channels.
void check_inner(const char* op, int inner, int channels);

// Throw unless a mask is [batch, steps] of booleans, and lengths are integers [batch].
void check_steps(const char* op, const std::optional<mx::array>& mask, const std::optional<mx::array>& lengths,
                 int batch, int steps);

// Adds the mask and the lengths, as int32, if there are any.
void add_steps(Arrays& inputs, const std::optional<mx::array>& mask, const std::optional<mx::array>& lengths, int steps,
               mx::Stream stream);

// The views [batch, steps, ...], states [batch, taps - 1, channels], weights [channels, taps] and bias [channels] of
// one dtype; a and b of this dtype, A_log and dt_bias; mask, and lengths of int32, if there are any -> the three parts,
// the next state, and gates and rates in float32.
Arrays layer_inputs(const char* op, Arrays inputs, const LayerInputsOptions& options, mx::Stream stream);

}  // namespace mittens
