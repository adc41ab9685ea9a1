// A token of a layer of state spaces, from its projection to the gate of its result, as Mamba 2 has it:
//
//   window = [conv_state; x B C];   x B C = silu(sum_j window[j] * conv_weight[:, j] + conv_bias)
//   conv_state = window[1:];   step = clip(log(1 + e^(dt + dt_bias)), least, greatest)
//   S = S * e^(-step e^A_log);   S += step x B^T;   y = (S C + D x) * silu(z)
//
// with a state S [rows, columns] for each head; heads of a group share B and C. z, x, B, C and dt are the parts of one
// projection. The norm of y takes all heads, and a threadgroup has one: it is a launch of its own.
//
// As many lanes share a row of the state as in recurrence.metal. The heads of a group each compute its B and C; the
// first writes their part of the next conv_state, which must not lie where the last one is read.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/reduce.h"
#include "recurrence/convolution.h"
#include "recurrence/gates.h"
#include "recurrence/state.h"

using namespace metal;
using namespace mittens;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32 * kTokenSimdgroups)]] void ssm_token(
    const device T* projected [[buffer(0)]],     // [batch, heads * rows + channels + heads]: z, x B C and dt
    const device T* conv_state [[buffer(1)]],    // [batch, taps - 1, channels]
    const device T* conv_weight [[buffer(2)]],   // [channels, taps]
    const device T* conv_bias [[buffer(3)]],     // [channels]
    const device ushort* a_log [[buffer(4)]],    // [heads], of a_log_type
    const device ushort* d [[buffer(5)]],        // [heads], of d_type
    const device ushort* dt_bias [[buffer(6)]],  // [heads], of dt_bias_type
    const device float* state_in [[buffer(7)]],  // [batch, heads, rows, columns]
    device T* y [[buffer(8)]],                   // [batch, heads, rows]
    device T* conv_out [[buffer(9)]],            // [batch, taps - 1, channels]
    device float* state_out [[buffer(10)]],      // [batch, heads, rows, columns]
    constant SsmTokenParams& params [[buffer(11)]], thread_of_simdgroups) {
  threadgroup float reads[kMostStateColumns];
  threadgroup float writes[kMostStateColumns];
  threadgroup float values[kMostTokenRows];
  constant StateParams& state = params.state;
  const uint threads = 32 * simdgroups;
  const uint sequence = group.x / state.heads;
  const uint head = group.x % state.heads;
  const uint heads_of_group = state.heads / state.key_heads;
  const uint of_group = head / heads_of_group;
  const bool is_first = head % heads_of_group == 0;

  const uint inner = state.heads * state.rows;
  const uint channels = inner + 2 * state.key_heads * state.columns;
  const size_t conv_at = size_t(sequence) * (params.taps - 1) * channels;
  projected += size_t(sequence) * (inner + channels + state.heads);
  for (uint i = t; i < 2 * state.columns + state.rows; i += threads) {
    const bool is_write = i < state.columns;
    const bool is_value = i >= 2 * state.columns;
    const uint at = is_write ? i : is_value ? i - 2 * state.columns : i - state.columns;
    const uint of_columns = inner + (is_write ? 0 : state.key_heads * state.columns) + of_group * state.columns;
    const uint channel = (is_value ? head * state.rows : of_columns) + at;
    const T x = projected[inner + channel];
    const device T* before = conv_state + conv_at + channel;
    const device T* weight = conv_weight + size_t(channel) * params.taps;
    device T* after = conv_out + conv_at + channel;
    float sum = params.taps == 4
                    ? convolution<T, 4>(x, before, weight, after, channels, 4, is_value || is_first)
                    : convolution<T, 0>(x, before, weight, after, channels, params.taps, is_value || is_first);
    if (params.has_bias) {
      sum += float(conv_bias[channel]);
    }
    threadgroup float* to = is_write ? writes : is_value ? values : reads;
    to[at] = sum * sigmoid(sum);
  }
  // Columns beyond the last are multiplied with the state's zeros there.
  for (uint i = state.columns + t; i < kStateValues * state.lanes; i += threads) {
    reads[i] = 0;
    writes[i] = 0;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float step = softplus(float(projected[inner + channels + head]) + number(dt_bias, params.dt_bias_type, head));
  step = step < params.least_step ? params.least_step : step;
  step = step > params.greatest_step ? params.greatest_step : step;
  const float gate = precise::exp(-(step * precise::exp(number(a_log, params.a_log_type, head))));
  const float skip = number(d, params.d_type, head);

  const uint rows_of_simdgroup = 32 / state.lanes;
  const uint rows_at_once = simdgroups * rows_of_simdgroup;
  const uint part = lane % state.lanes;
  uint row = simdgroup * rows_of_simdgroup + lane / state.lanes;
  const size_t state_at = size_t(group.x) * state.rows * state.columns;
  for (uint first = 0; first < state.rows; first += rows_at_once) {
    const bool exists = row < state.rows;
    const float x = values[min(row, state.rows - 1)];
    float s[kStateValues];
    if (exists) {
      load_values(state_in + state_at + size_t(row) * state.columns, part, state, s);
    }
    float columns[kStateValues];
    shared_values(writes, part, state.lanes, columns);
#pragma unroll
    for (int i = 0; i < kStateValues; ++i) {
      s[i] = fma(step * x, columns[i], exists ? s[i] * gate : 0.0f);
    }
    shared_values(reads, part, state.lanes, columns);
    float result = 0;
#pragma unroll
    for (int i = 0; i < kStateValues; ++i) {
      result = fma(s[i], columns[i], result);
    }
    result = fma(skip, x, row_sum(result, state.lanes));
    if (exists) {
      store_values(state_out + state_at + size_t(row) * state.columns, part, state, s);
      if (part == 0) {
        const float z = float(projected[head * state.rows + row]);
        y[size_t(group.x) * state.rows + row] = T(params.is_gated ? result * (z * sigmoid(z)) : result);
      }
    }
    row += rows_at_once;
  }
}

instantiate_types("ssm_token", ssm_token)
