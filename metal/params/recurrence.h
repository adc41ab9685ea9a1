// Parameters of the linear recurrences. Compiled by C++ and by Metal.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mittens {

enum {
  kStateValues = 16,  // of a row of the state, that a lane holds
  kMostStateColumns = 32 * kStateValues,
  kStateSimdgroups = 4,     // of a threadgroup
  kMostTokenRows = 512,     // of a state, where one threadgroup has a token of a head
  kTokenSimdgroups = 16,    // of that threadgroup, at most
  kShortConvThreads = 128,  // of a threadgroup of short_conv_token
  kShortConvTokens = 16,    // of a thread, where there are several
  kInputChannels = 128,     // of a simdgroup of layer_inputs
  kInputSteps = 16,         // of a simdgroup of layer_inputs, at most
  kInputSimdgroups = 4      // of a threadgroup of layer_inputs
};

// Of the numbers of an array.
enum { kFloat32, kFloat16, kBfloat16 };

// A state [rows, columns] for each head of each sequence.
struct StateParams {
  uint32_t steps;
  uint32_t heads;
  uint32_t key_heads;  // each shared by heads / key_heads heads
  uint32_t rows;
  uint32_t columns;
  uint32_t lanes;      // of a simdgroup that hold a row; a power of two
  uint32_t packs;      // whether rows are whole groups of 8, each on a boundary of 16 bytes
  uint32_t has_state;  // else it begins with zeros
  uint32_t has_mask;
};

struct RecurrenceParams {
  StateParams state;
  uint32_t gate_per_column;  // else one for a head
  uint32_t rate_type;
};

struct StateSpaceParams {
  StateParams state;
  uint32_t a_log_type;
  uint32_t d_type;
  uint32_t dt_type;
  uint32_t dt_bias_type;
  uint32_t wide_y;  // whether it is float32
  float least_step;
  float greatest_step;
};

// Elements from sequence to sequence, from key head to key head, and from head to head of a key head. Rows lie as they
// are.
struct HeadStrides {
  int64_t sequence;
  int64_t key_head;
  int64_t head;
};

struct GatedDeltaTokenParams {
  HeadStrides q;
  HeadStrides k;
  HeadStrides v;
  HeadStrides z;
  HeadStrides a;
  HeadStrides b;
  StateParams state;
  uint32_t taps;  // of the convolution
  uint32_t a_log_type;
  uint32_t dt_bias_type;
  uint32_t norm_type;
  float key_eps;  // added to the sums of squares of q and k
  float eps;      // of the norm
};

struct GatedDeltaTokenApartParams {
  GatedDeltaTokenParams token;
  uint32_t gate_per_column;  // else one for a head
  uint32_t is_sigmoid;       // the gate of the result, else SiLU
};

struct SsmTokenParams {
  StateParams state;
  uint32_t taps;      // of the convolution
  uint32_t has_bias;  // of the convolution
  uint32_t is_gated;  // whether y is
  uint32_t a_log_type;
  uint32_t d_type;
  uint32_t dt_bias_type;
  float least_step;
  float greatest_step;
};

struct ShortConvTokenParams {
  uint32_t channels;
  uint32_t taps;
  uint32_t has_bias;
  uint32_t in_place;  // whether the state is; not with several tokens
  uint32_t tokens;
};

// Elements from sequence to sequence, from step to step, from key head to key head, and from head to head of a key
// head.
struct StepStrides {
  int64_t sequence;
  int64_t step;
  int64_t key_head;
  int64_t head;
};

// Some channels of a convolution over the steps of a sequence: blocks of neighbours, which may be normalized each.
struct InputPart {
  int64_t sequence;  // elements from one to the next, as of steps and blocks
  int64_t step;
  int64_t block;
  int64_t state_sequence;
  int64_t state_tap;
  uint32_t blocks;
  uint32_t width;      // of a block
  uint32_t units;      // simdgroups, each with kInputChannels of a block at most, or with one that is normalized
  uint32_t input_at;   // the first channel in a step of the inputs
  uint32_t weight_at;  // in the weights
  uint32_t state_at;
  uint32_t next_at;  // in the next state
  uint32_t packs;    // whether four channels lie as one load takes them
  uint32_t is_normalized;
  float scale;  // of a normalized block
};

struct LayerInputsParams {
  InputPart parts[3];
  StepStrides a;
  StepStrides b;
  uint32_t steps;
  uint32_t taps;
  uint32_t channels;  // of the next state
  uint32_t heads;     // with gates and rates; none for a layer without
  uint32_t heads_of_key;
  uint32_t gates;  // of a head
  uint32_t a_log_type;
  uint32_t dt_bias_type;
  uint32_t has_state;
  uint32_t has_bias;
  uint32_t has_mask;
  uint32_t has_lengths;
  float key_eps;  // added to the sums of squares
};

}  // namespace mittens
