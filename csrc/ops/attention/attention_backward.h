// The gradients of attention by kernels, from the forward pass's results and each row's logsumexp.
#pragma once

#include "ops/attention/attention_composed.h"

namespace mittens {

// Whether kernels or native code compute the gradients of a call; if not, attention_composed.h does.
bool attention_backward_covers(const DenseAttention& call, mx::Stream stream);

// y: the call's result. logsumexp [batch, heads, queries]: of a row's scores and its sink in float32, -inf where it
// sees no key. dy: the cotangent of y.
AttentionGradients attention_backward(const DenseAttention& call, const mx::array& y, const mx::array& logsumexp,
                                      const mx::array& dy, const WantedGradients& wanted, mx::Stream stream);

// The logsumexp in mx operations.
mx::array composed_logsumexp(const DenseAttention& call, mx::Stream stream);

}  // namespace mittens
