// A token of layers that keep the inputs of a short convolution, and maybe a state for each head, on the CPU. The files
// of the same names in metal/recurrence have the formulas.
#pragma once

#include "cpu/recurrence.h"
#include "cpu/types.h"

namespace mittens::cpu {

struct TokenConvolution {
  const void* before;  // [batch, taps - 1, channels]
  const void* weight;  // [channels, taps]
  const void* bias;  // [channels], or null
  void* after;  // as before, which it may be where no other task reads a channel
};

struct ShortConvToken {
  size_t batch;
  size_t tokens;
  size_t channels;
  size_t taps;
};

struct SsmToken {
  size_t batch;
  size_t heads;
  size_t groups;  // each of which heads / groups heads share
  size_t rows;
  size_t columns;
  size_t taps;
  float least_step;
  float greatest_step;
  bool is_gated;  // whether y is

  size_t inner() const {
    return heads * rows;
  }
  size_t channels() const {
    return inner() + 2 * groups * columns;
  }
};

struct SsmTokenInputs {
  const void* projected;  // [batch, inner + channels + heads]: z, x B C and dt
  TokenConvolution convolution;
  Numbers a_log;  // [heads]
  Numbers d;  // [heads]
  Numbers dt_bias;  // [heads]
  const float* state;  // [batch, heads, rows, columns]
};

void short_conv_token(Type type, const ShortConvToken& shape,
                      const void* projected,  // [batch, tokens, 3 * channels]
                      const TokenConvolution& convolution,
                      void* y);  // [batch, tokens, channels]

// The state may be written in place.
void ssm_token(Type type, const SsmToken& shape, const SsmTokenInputs& inputs,
               void* y,  // [batch, inner]
               float* state);  // [batch, heads, rows, columns]

}  // namespace mittens::cpu
