// The steps of a linear recurrence, wherever its gates and rates come from.
//
// `Numbers` are a head's at a step. For a step that it sees(): column_gates() where has_column_gates(), else gate();
// then rate(). For each: write() stores y, next() goes on to the next step. corrects() says whether the state's value
// for k is subtracted from v.
#pragma once

#include "recurrence/state.h"

namespace mittens {

template <typename T, typename Numbers>
inline void over_steps(
    const device T* q, const device T* k, const device T* v, const device float* state_in, device float* state_out,
    thread Numbers& numbers, constant StateParams& state, StatePlace place) {
  const size_t first_step = size_t(place.sequence) * state.steps;
  const size_t key_stride = size_t(state.key_heads) * state.columns;
  const size_t value_stride = size_t(state.heads) * state.rows;
  q += first_step * key_stride + place.key_head * state.columns;
  k += first_step * key_stride + place.key_head * state.columns;
  v += first_step * value_stride + place.head * state.rows + place.row;
  const uint of_head = place.sequence * state.heads + place.head;
  const size_t state_at = (size_t(of_head) * state.rows + place.row) * state.columns;

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
    float value, result = 0;
    if (numbers.sees(first_step + step)) {
      float columns[kStateValues];
      if (numbers.has_column_gates()) {
        load_values(numbers.column_gates(), place.lane, state, columns);
#pragma unroll
        for (int i = 0; i < kStateValues; ++i) {
          s[i] *= columns[i];
        }
      } else {
        const float gate = numbers.gate();
#pragma unroll
        for (int i = 0; i < kStateValues; ++i) {
          s[i] *= gate;
        }
      }
      load_values(k, place.lane, state, columns);
      float predicted = 0;
      if (numbers.corrects()) {
#pragma unroll
        for (int i = 0; i < kStateValues; ++i) {
          predicted = fma(s[i], columns[i], predicted);
        }
        predicted = row_sum(predicted, state.lanes);
      }
      value = v[0];
      const float delta = numbers.rate() * (value - predicted);
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
    } else {
      value = v[0];
    }
    if (place.writes && place.lane == 0) {
      numbers.write(result, value);
    }
    q += key_stride;
    k += key_stride;
    v += value_stride;
    numbers.next();
  }
  if (place.writes) {
    store_values(state_out + state_at, place.lane, state, s);
  }
}

}  // namespace mittens
