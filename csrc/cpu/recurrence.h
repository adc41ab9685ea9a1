// The gated delta rule on the CPU: a state S [rows, columns] for each head of each sequence, and for each step
//
//   S = S * gate;   S += rate (v - S k) k^T;   y = S q
//
// State spaces do not correct: S += rate v k^T.
//
// A step that the mask hides leaves S alone, and its y is 0.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

struct Recurrence {
  size_t batch;
  size_t steps;
  size_t heads;
  size_t key_heads;  // each of which heads / key_heads heads share
  size_t rows;
  size_t columns;
  bool gate_per_column;  // else one for a head
  bool corrects;  // whether what the state has for k is taken off v
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

// Gradients for the cotangents of y and of the last state. States are computed again, from one that is kept every 32
// steps.
void recurrence_vjp(Type type, const Recurrence& shape, const RecurrenceInputs& inputs, const void* dy,
                    const float* dstate, const RecurrenceGradients& gradients);

}  // namespace mittens::cpu
