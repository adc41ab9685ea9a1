// The gated delta rule: a state S [rows, columns] for each head, zeros at first or given, and for each step
//
//   S = S * gate;   S += beta (v - S k) k^T;   y = S q
//
// The gate is one number, or one for each column. A step that the mask hides leaves S alone, and its y is 0.
//
// Rows of S depend on q and k alone, not on each other: the lanes that share a row keep it in registers over all steps.
// A step takes two sums over these lanes. A threadgroup of 4 simdgroups has rows of one head.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "recurrence/over_steps.h"

using namespace metal;
using namespace mittens;

template <typename T>
struct GivenNumbers {
  const device float* gates;  // [1 or columns], the first of this step
  const device ushort* rates;
  const device bool* mask;
  device T* y;
  constant RecurrenceParams* params;
  size_t at;  // in the rates

  GivenNumbers(
      const device float* first_gates, const device ushort* first_rates, const device bool* all_of_mask,
      device T* first_y, constant RecurrenceParams& all, StatePlace place)
      : rates(first_rates), mask(all_of_mask), params(&all) {
    const size_t first_step = size_t(place.sequence) * all.state.steps;
    const size_t value_stride = size_t(all.state.heads) * all.state.rows;
    at = first_step * all.state.heads + place.head;
    gates = first_gates + at * gate_size();
    y = first_y + first_step * value_stride + place.head * all.state.rows + place.row;
  }

  uint gate_size() const {
    return params->gate_per_column ? params->state.columns : 1;
  }
  bool sees(size_t step) const {
    return !params->state.has_mask || mask[step];
  }
  bool corrects() const {
    return true;
  }
  bool has_column_gates() const {
    return params->gate_per_column;
  }
  const device float* column_gates() const {
    return gates;
  }
  float gate() const {
    return gates[0];
  }
  float rate() const {
    return number(rates, params->rate_type, at);
  }
  void write(float result, float) const {
    y[0] = T(result);
  }
  void next() {
    gates += params->state.heads * gate_size();
    y += size_t(params->state.heads) * params->state.rows;
    at += params->state.heads;
  }
};

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32 * kStateSimdgroups)]] void recurrence(
    const device T* q [[buffer(0)]],             // [batch, steps, key_heads, columns]
    const device T* k [[buffer(1)]],             // [batch, steps, key_heads, columns]
    const device T* v [[buffer(2)]],             // [batch, steps, heads, rows]
    const device float* gates [[buffer(3)]],     // [batch, steps, heads] or [batch, steps, heads, columns]
    const device ushort* rates [[buffer(4)]],    // beta [batch, steps, heads], of rate_type
    const device float* state_in [[buffer(5)]],  // [batch, heads, rows, columns]
    const device bool* mask [[buffer(6)]],       // [batch, steps]
    device T* y [[buffer(7)]],                   // [batch, steps, heads, rows]
    device float* state_out [[buffer(8)]],       // [batch, heads, rows, columns]
    constant RecurrenceParams& params [[buffer(9)]], lane_of_simdgroup) {
  const StatePlace place = state_place(group, simdgroup, lane, params.state);
  GivenNumbers<T> numbers(gates, rates, mask, y, params, place);
  over_steps(q, k, v, state_in, state_out, numbers, params.state, place);
}

instantiate_types("recurrence", recurrence)
