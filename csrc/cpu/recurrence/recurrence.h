// The gated delta rule on the CPU: a state S [rows, columns] for each head of each sequence, and for each step
//
//   S = S * gate;   S += rate (v - S k) k^T;   y = S q
//
// A step that the mask hides leaves S alone, and its y is 0.
//
// A state space does not correct (S += rate v k^T), and has its gates and rates from time steps:
//
//   step = clip(log(1 + e^(dt + dt_bias)), least, greatest)
//   S = S * e^(-step e^A_log);   S += step x B^T;   y = S C + D x
//
// A step that the mask hides has D x for y.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

struct Recurrence {
  size_t batch;
  size_t steps;
  size_t heads;
  size_t key_heads;  // heads / key_heads heads share each
  size_t rows;
  size_t columns;
  bool gate_per_column;  // else one for a head
  bool corrects;  // whether the state's prediction for k is subtracted from v
};

struct RecurrenceInputs {
  const void* q;  // [batch, steps, key_heads, columns]
  const void* k;  // [batch, steps, key_heads, columns]
  const void* v;  // [batch, steps, heads, rows]
  const float* gates;  // [batch, steps, heads] or [batch, steps, heads, columns]
  const void* rates;  // [batch, steps, heads]
  Type rate_type;
  const float* state;  // [batch, heads, rows, columns] or nullptr: zeros
  const bool* mask;  // [batch, steps] or nullptr
};

// Each of its own type.
struct Numbers {
  const void* data;
  Type type;
};

struct StateSpaceInputs {
  const void* x;  // [batch, steps, heads, rows]
  const void* b;  // [batch, steps, key_heads, columns]
  const void* c;  // [batch, steps, key_heads, columns]
  Numbers a_log;  // [heads]
  Numbers d;  // [heads]
  Numbers dt;  // [batch, steps, heads]
  Numbers dt_bias;  // [heads]
  const float* state;  // [batch, heads, rows, columns] or nullptr: zeros
  const bool* mask;  // [batch, steps] or nullptr
  float least_step;
  float greatest_step;
};

// A token of a layer of the gated delta rule, from its projections to its gated norm (metal/recurrence/
// gated_delta_token.metal has the formula).
struct GatedDeltaToken {
  size_t batch;
  size_t key_heads;
  size_t heads_of_key;  // of each key head
  size_t rows;
  size_t columns;
  size_t taps;  // of the convolution
  float key_eps;  // added to the sums of squares of q and k
  float eps;  // of the norm
  bool gate_per_column;  // else one for a head
  bool is_sigmoid;  // the gate of the result, else SiLU

  size_t heads() const {
    return key_heads * heads_of_key;
  }
};

// The channels of q, of k or of v in a causal convolution. States may be the same memory if each key head has one head.
struct ConvolvedPart {
  const void* before;  // [batch, taps - 1, channels] by strides of sequences and taps
  int64_t sequence, tap;
  const void* weight;  // [channels, taps]
  void* after;  // likewise
  int64_t after_sequence, after_tap;
};

// Rows of heads: elements from sequence to sequence, from key head to key head, and from head to head of a key head.
struct HeadRows {
  const void* data;
  int64_t sequence, key_head, head;
};

struct GatedDeltaTokenInputs {
  HeadRows q;  // [batch, key_heads, columns]
  HeadRows k;  // [batch, key_heads, columns]
  HeadRows v;  // [batch, key_heads, heads_of_key, rows]
  HeadRows z;  // [batch, key_heads, heads_of_key, rows]
  HeadRows a;  // [batch, key_heads, heads_of_key], and columns if these have gates
  HeadRows b;  // [batch, key_heads, heads_of_key]
  ConvolvedPart parts[3];  // q, k and v
  Numbers a_log;  // [heads]
  Numbers dt_bias;  // [heads], or [heads, columns]
  Numbers norm_weight;  // [rows]
  const float* state;  // [batch, heads, rows, columns]
};

struct RecurrenceGradients {
  void* q;  // of the inputs' shapes, as all are
  void* k;
  void* v;
  float* gates;
  float* rates;
  float* state;
};

// The state may be written in place.
void recurrence(Type type,  // of q, k, v and y
                const Recurrence& shape, const RecurrenceInputs& inputs,
                void* y,  // [batch, steps, heads, rows]
                float* state);  // [batch, heads, rows, columns]

void state_space(Type type,  // of x, B and C
                 const Recurrence& shape, const StateSpaceInputs& inputs,
                 Type y_type,  // this type, or float32
                 void* y,  // [batch, steps, heads, rows]
                 float* state);  // [batch, heads, rows, columns]

// The state may be written in place.
void gated_delta_token(Type type,  // of all but numbers
                       const GatedDeltaToken& shape, const GatedDeltaTokenInputs& inputs,
                       void* y,  // [batch, heads, rows]
                       float* state);  // [batch, heads, rows, columns]

// Gradients for the cotangents of y and of the last state. States are computed again, from one that is kept every 32
// steps.
void recurrence_vjp(Type type, const Recurrence& shape, const RecurrenceInputs& inputs, const void* dy,
                    const float* dstate, const RecurrenceGradients& gradients);

}  // namespace mittens::cpu
