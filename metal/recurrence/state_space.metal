// State spaces: a state S [rows, columns] for each head, zeros at first or given, and for each step
//
//   step = clip(log(1 + e^(dt + dt_bias)), least, greatest)
//   S = S * e^(-step e^A_log);   S += step x B^T;   y = S C + D x
//
// A step that the mask hides leaves S alone, and its y is D x.
//
// Threads: as of recurrence.metal, whose queries, keys and values are C, B and x. Each lane computes the gate and the
// step of its head, which takes less time than its part of the state.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "recurrence/gates.h"
#include "recurrence/over_steps.h"

using namespace metal;
using namespace mittens;

template <typename T>
struct SpaceNumbers {
  const device ushort* dt;
  const device bool* mask;
  device T* y;
  constant StateSpaceParams* params;
  size_t at;  // in dt
  size_t y_at;
  float bias, decay, skip;  // dt_bias, e^A_log and D
  float step;

  bool sees(size_t at_step) const {
    return !params->state.has_mask || mask[at_step];
  }
  bool corrects() const {
    return false;
  }
  bool has_column_gates() const {
    return false;
  }
  const device float* column_gates() const {
    return nullptr;
  }
  float gate() {
    step = softplus(number(dt, params->dt_type, at) + bias);
    step = step < params->least_step ? params->least_step : step;
    step = step > params->greatest_step ? params->greatest_step : step;
    return precise::exp(-(step * decay));
  }
  float rate() const {
    return step;
  }
  void write(float result, float x) const {
    const float sum = fma(skip, x, result);
    if (params->wide_y) {
      ((device float*)y)[y_at] = sum;
    } else {
      y[y_at] = T(sum);
    }
  }
  void next() {
    at += params->state.heads;
    y_at += size_t(params->state.heads) * params->state.rows;
  }
};

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32 * kStateSimdgroups)]] void state_space(
    const device T* x [[buffer(0)]],             // [batch, steps, heads, rows]
    const device ushort* a_log [[buffer(1)]],    // [heads], of a_log_type
    const device T* b [[buffer(2)]],             // [batch, steps, key_heads, columns]
    const device T* c [[buffer(3)]],             // [batch, steps, key_heads, columns]
    const device ushort* d [[buffer(4)]],        // [heads], of d_type
    const device ushort* dt [[buffer(5)]],       // [batch, steps, heads], of dt_type
    const device ushort* dt_bias [[buffer(6)]],  // [heads], of dt_bias_type
    const device float* state_in [[buffer(7)]],  // [batch, heads, rows, columns]
    const device bool* mask [[buffer(8)]],       // [batch, steps]
    device T* y [[buffer(9)]],                   // [batch, steps, heads, rows], of float32 where wide_y says so
    device float* state_out [[buffer(10)]],      // [batch, heads, rows, columns]
    constant StateSpaceParams& params [[buffer(11)]], lane_of_simdgroup) {
  const StatePlace place = state_place(group, simdgroup, lane, params.state);
  const size_t at = size_t(place.sequence) * params.state.steps * params.state.heads + place.head;
  const float bias = number(dt_bias, params.dt_bias_type, place.head);
  const float decay = precise::exp(number(a_log, params.a_log_type, place.head));
  const float skip = number(d, params.d_type, place.head);
  SpaceNumbers<T> numbers{dt, mask, y, &params, at, at * params.state.rows + place.row, bias, decay, skip, 0};
  over_steps(c, b, x, state_in, state_out, numbers, params.state, place);
}

instantiate_types("state_space", state_space)
