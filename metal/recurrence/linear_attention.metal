// Linear attention: a state S [rows, columns] for each head, zeros at first or given, and for each step
//
//   S = S * decay;   S += v k^T;   y = scale S q
//
// Threads: as of recurrence.metal.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "recurrence/over_steps.h"

using namespace metal;
using namespace mittens;

template <typename T>
struct DecayNumbers {
  device T* y;
  uint value_stride;
  float decay, scale;

  bool sees(size_t) const {
    return true;
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
  float gate() const {
    return decay;
  }
  float rate() const {
    return 1;
  }
  void write(float result, float) const {
    y[0] = T(scale * result);
  }
  void next() {
    y += value_stride;
  }
};

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32 * kStateSimdgroups)]] void linear_attention(
    const device T* q [[buffer(0)]],             // [batch, steps, key_heads, columns]
    const device T* k [[buffer(1)]],             // [batch, steps, key_heads, columns]
    const device T* v [[buffer(2)]],             // [batch, steps, heads, rows]
    const device ushort* decays [[buffer(3)]],   // [heads], of decay_type
    const device float* state_in [[buffer(4)]],  // [batch, heads, rows, columns]
    device T* y [[buffer(5)]],                   // [batch, steps, heads, rows]
    device float* state_out [[buffer(6)]],       // [batch, heads, rows, columns]
    constant LinearAttentionParams& params [[buffer(7)]],
    lane_of_simdgroup) {
  const StatePlace place = state_place(group, simdgroup, lane, params.state);
  const uint value_stride = params.state.heads * params.state.rows;
  const float decay = params.has_decays ? number(decays, params.decay_type, place.head) : params.decay;
  y += size_t(place.sequence) * params.state.steps * value_stride + place.head * params.state.rows + place.row;
  DecayNumbers<T> numbers{y, value_stride, decay, params.scale};
  over_steps(q, k, v, state_in, state_out, numbers, params.state, place);
}

instantiate_types("linear_attention", linear_attention)
