// The launches of the kernels in metal/attention/attention_backward.metal.
#pragma once

#include "ops/attention/attention_composed.h"

namespace mittens {

// The width of the kernels that serve heads of these widths, which are padded to it; 0 where none does.
int attention_backward_width(const mx::Shape& queries, const mx::Shape& values);

// The rows, copied unless they start on multiples of 16 bytes, their last stride is 1, and the kernels' offsets reach
// from the first of a head to its last.
mx::array with_near_rows(const mx::array& rows, mx::Stream stream);

// The arrays of a call as kernels read them, of their width: queries, keys, values, y and dy with near rows, the mask
// with the strides of the scores, the others row contiguous.
struct BackwardArrays {
  const mx::array& queries;
  const mx::array& keys;
  const mx::array& values;
  const mx::array* mask;
  const mx::array* sinks;
  const mx::array& y;
  const mx::array& logsumexp;
  const mx::array& dy;
};

// outputs: the gradients that are wanted, in the order of WantedGradients.
std::vector<Launch> attention_backward_launches(const BackwardArrays& arrays, const std::vector<mx::array>& outputs,
                                                const AttentionOptions& options, const WantedGradients& wanted,
                                                mx::Stream stream);

}  // namespace mittens
