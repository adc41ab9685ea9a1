// Linear recurrences: a state S [rows, columns] for each head, zeros at first or given, and for each step
//
//   S = S * gate;   S += beta (v - S k) k^T;   y = S q   (the gated delta rule)
//   S = S * gate;   S += beta v k^T;           y = S q   (state spaces, linear attention)
//
// The gate is one number, or one for each column. A step that the mask hides leaves S alone, and its y is 0.
//
// Rows of S depend on q and k alone, not on each other: the lanes that share a row keep it in registers over all steps.
// A step takes two sums over these lanes. A threadgroup of 4 simdgroups has rows of one head.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "recurrence/state.h"

using namespace metal;
using namespace mittens;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32 * kStateSimdgroups)]] void recurrence(
    const device T* q [[buffer(0)]],             // [batch, steps, key_heads, columns]
    const device T* k [[buffer(1)]],             // [batch, steps, key_heads, columns]
    const device T* v [[buffer(2)]],             // [batch, steps, heads, rows]
    const device float* gates [[buffer(3)]],     // [batch, steps, heads] or [batch, steps, heads, columns]
    const device T* rates [[buffer(4)]],         // beta [batch, steps, heads], or of float32
    const device float* state_in [[buffer(5)]],  // [batch, heads, rows, columns]
    const device bool* mask [[buffer(6)]],       // [batch, steps]
    device T* y [[buffer(7)]],                   // [batch, steps, heads, rows]
    device float* state_out [[buffer(8)]],       // [batch, heads, rows, columns]
    constant RecurrenceParams& params [[buffer(9)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constant StateParams& state = params.state;
  const StatePlace place = state_place(group, simdgroup, lane, state);
  const size_t first_step = size_t(place.sequence) * state.steps;
  const size_t key_stride = size_t(state.key_heads) * state.columns;
  const size_t value_stride = size_t(state.heads) * state.rows;
  const uint gate_size = params.gate_per_column ? state.columns : 1;
  q += first_step * key_stride + place.key_head * state.columns;
  k += first_step * key_stride + place.key_head * state.columns;
  v += first_step * value_stride + place.head * state.rows + place.row;
  y += first_step * value_stride + place.head * state.rows + place.row;
  gates += (first_step * state.heads + place.head) * gate_size;
  const size_t state_at = (size_t(group.x) * state.rows + place.row) * state.columns;

  float s[kStateValues];
  if (state.has_state && place.writes) {
    load_values(state_in + state_at, place.lane, state, s);
  } else {
#pragma unroll
    for (int i = 0; i < kStateValues; ++i) {
      s[i] = 0;
    }
  }
  for (uint step = 0; step < state.steps; ++step) {
    float result = 0;
    if (!state.has_mask || mask[first_step + step]) {
      float columns[kStateValues];
      if (params.gate_per_column) {
        load_values(gates, place.lane, state, columns);
#pragma unroll
        for (int i = 0; i < kStateValues; ++i) {
          s[i] *= columns[i];
        }
      } else {
        const float gate = gates[0];
#pragma unroll
        for (int i = 0; i < kStateValues; ++i) {
          s[i] *= gate;
        }
      }
      load_values(k, place.lane, state, columns);
      float predicted = 0;
      if (params.corrects) {
#pragma unroll
        for (int i = 0; i < kStateValues; ++i) {
          predicted = fma(s[i], columns[i], predicted);
        }
        predicted = row_sum(predicted, state.lanes);
      }
      const float rate = number(rates, params.wide_rates, (first_step + step) * state.heads + place.head);
      const float delta = rate * (float(v[0]) - predicted);
#pragma unroll
      for (int i = 0; i < kStateValues; ++i) {
        s[i] = fma(delta, columns[i], s[i]);
      }
      load_values(q, place.lane, state, columns);
#pragma unroll
      for (int i = 0; i < kStateValues; ++i) {
        result = fma(s[i], columns[i], result);
      }
      result = row_sum(result, state.lanes);
    }
    if (place.writes && place.lane == 0) {
      y[0] = T(result);
    }
    q += key_stride;
    k += key_stride;
    v += value_stride;
    y += value_stride;
    gates += state.heads * gate_size;
  }
  if (place.writes) {
    store_values(state_out + state_at, place.lane, state, s);
  }
}

instantiate_types("recurrence", recurrence)
