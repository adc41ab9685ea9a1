// A token of layers that keep the inputs of a short convolution, and maybe a state for each head, and the inputs of
// recurrences of a prompt, on the CPU. The files of the same names in metal/recurrence have the formulas.
#pragma once

#include "cpu/recurrence/recurrence.h"
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
  size_t groups;  // each shared by heads / groups heads
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

// Some channels of a convolution over all steps of a prompt: blocks of neighbours, which may be normalized each.
struct LayerPart {
  const void* x;  // [batch, steps, blocks, width] by strides
  int64_t sequence, step, block;
  const void* before;  // [batch, taps - 1, channels] by strides, or null: zeros
  int64_t state_sequence, state_tap;
  const void* weight;  // [channels, taps]
  const void* bias;  // [channels], or null
  size_t blocks;
  size_t width;
  bool is_normalized;
  float scale;  // of a normalized block
  void* out;  // [batch, steps, blocks, width]
  void* next;  // [batch, taps - 1, all channels], from the first one of the part
};

struct LayerInputs {
  size_t batch;
  size_t steps;
  size_t taps;
  size_t channels;  // of the next state
  size_t heads;  // with gates and rates; none for a layer without
  size_t heads_of_key;
  size_t gates;  // of a head
  float key_eps;  // added to the sums of squares
  LayerPart parts[3];
  const void* a;  // [batch, steps, heads] by strides, or one for each column
  int64_t a_strides[4];  // elements from sequence to sequence, step to step, key head to key head and head to head
  const void* b;  // [batch, steps, heads] by strides
  int64_t b_strides[4];
  Numbers a_log;  // [heads]
  Numbers dt_bias;  // [heads] or [heads, columns]
  const bool* mask;  // [batch, steps], or null
  const int32_t* lengths;  // [batch], or null
  float* gates_out;  // as a
  float* rates_out;  // as b
};

// The inputs of a recurrence, from a prompt's projections.
void layer_inputs(Type type, const LayerInputs& all);

void short_conv_token(Type type, const ShortConvToken& shape,
                      const void* projected,  // [batch, tokens, 3 * channels]
                      const TokenConvolution& convolution,
                      void* y);  // [batch, tokens, channels]

// The state may be written in place.
void ssm_token(Type type, const SsmToken& shape, const SsmTokenInputs& inputs,
               void* y,  // [batch, inner]
               float* state);  // [batch, heads, rows, columns]

}  // namespace mittens::cpu
