// The gradients of attention on the CPU, from the logsumexp of each row of scores: blocks of weights are computed
// again, so that they are never all there. Sums are float32 and in an order that does not depend on the number of
// threads.
//
//   p = exp(scale * q k^T + mask - logsumexp)     delta = sum(dy * y)     ds = p * (dy v^T - delta)
//   dq = scale ds k     dk = scale ds^T q     dv = p^T dy     dmask = ds     dsink = -sum(exp(sink - logsumexp) *
//   delta)
#pragma once

#include "cpu/attention/attention.h"

namespace mittens::cpu {

struct AttentionBackward {
  Attention forward;  // keys and values not packed; y and logsumexp are not written
  AttentionView y;  // [batch, heads, queries, value_width]
  AttentionView dy;
  const float* logsumexp;  // [batch, heads, queries]
  size_t mask_sizes[4];  // of the mask as it was given: 1 where it is broadcast
  // Row contiguous, of the call's type; nullptr where a gradient is not wanted.
  void* dq;
  void* dk;
  void* dv;
  void* dmask;
  void* dsinks;
};

void attention_backward(const AttentionBackward& call);

}  // namespace mittens::cpu
