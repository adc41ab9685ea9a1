// The gradients of attention by kernels, from what the forward left: the results and each row's logsumexp.
#pragma once

#include "ops/attention/attention_composed.h"

namespace mittens {

// Whether there are kernels or native code for the gradients of such a call; mx operations compute those of others
// (attention_composed.h).
bool attention_backward_covers(const DenseAttention& call, mx::Stream stream);

// y: the call's result. logsumexp [batch, heads, queries]: of a row's scores and its sink in float32, -inf where it
// sees no key. dy: the cotangent of y.
AttentionGradients attention_backward(const DenseAttention& call, const mx::array& y, const mx::array& logsumexp,
                                      const mx::array& dy, const WantedGradients& wanted, mx::Stream stream);

// The logsumexp in mx operations.
mx::array composed_logsumexp(const DenseAttention& call, mx::Stream stream);

}  // namespace mittens
