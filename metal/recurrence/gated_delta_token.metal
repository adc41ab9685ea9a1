// A token of a layer of the gated delta rule, from its projections to its gated norm:
//
//   window = [conv_state; q k v];   q k v = silu(sum_j window[j] * conv_weight[:, j]);   conv_state = window[1:]
//   q = columns^(-1/2) q / |q|;   k = k / |k|;   gate = e^(-e^A_log log(1 + e^(a + dt_bias)));   beta = sigmoid(b)
//   S = S * gate;   S += beta (v - S k) k^T;   y = norm_weight (S q) / rms(S q) * silu(z)
//
// with a state S [rows, columns] for each head. |.| has key_eps under its root. gated_delta_token_apart has conv_state
// and conv_weight of q, of k and of v apart, may have a gate for each column of the state, and may leave out the last
// factor z.
//
// One threadgroup has a head, whose norm takes all rows: as many lanes share a row of the state as in recurrence.metal,
// and a simdgroup has several rows. The heads of a key head each compute its q and k; the first writes their part of
// the next conv_state, which must not lie where the last one is read if a key head has several heads.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/reduce.h"
#include "mittens/rms.h"
#include "recurrence/convolution.h"
#include "recurrence/gates.h"
#include "recurrence/state.h"

using namespace metal;
using namespace mittens;

// The channels of a part, q, k or v, or of all in the convolution.
template <typename T>
struct Channels {
  const device T* before;  // [batch, taps - 1, channels]
  const device T* weight;  // [channels, taps]
  device T* after;         // [batch, taps - 1, channels]
};

// A head's part in threadgroup memory.
struct HeadMemory {
  threadgroup float* queries;
  threadgroup float* keys;
  threadgroup float* values;
  threadgroup float* results;
  threadgroup float* partials;
  threadgroup float* gates;  // of columns, where these have their own
};

// Channels of q, of k and of v, or, where these are not Apart, three times the channels of all.
template <typename T, bool Apart>
inline void token_of_head(
    const device T* q, const device T* k, const device T* v, const device T* z, const device T* a, const device T* b,
    Channels<T> of_q, Channels<T> of_k, Channels<T> of_v, const device ushort* a_log, const device ushort* dt_bias,
    const device ushort* norm_weight, const device float* state_in, device T* y, device float* state_out,
    constant GatedDeltaTokenParams& params, bool gate_per_column, bool is_sigmoid, HeadMemory memory, uint3 group,
    uint t, uint lane, uint simdgroup, uint simdgroups) {
  threadgroup float* queries = memory.queries;
  threadgroup float* keys = memory.keys;
  threadgroup float* values = memory.values;
  threadgroup float* results = memory.results;
  threadgroup float* partials = memory.partials;
  constant StateParams& state = params.state;
  const uint threads = 32 * simdgroups;
  const uint sequence = group.x / state.heads;
  const uint head = group.x % state.heads;
  const uint heads_of_key = state.heads / state.key_heads;
  const uint key_head = head / heads_of_key;
  const uint head_of_key = head % heads_of_key;

  q += sequence * params.q.sequence + key_head * params.q.key_head;
  k += sequence * params.k.sequence + key_head * params.k.key_head;
  v += sequence * params.v.sequence + key_head * params.v.key_head + head_of_key * params.v.head;
  z += sequence * params.z.sequence + key_head * params.z.key_head + head_of_key * params.z.head;
  float2 squares = 0;
  for (uint i = t; i < 2 * state.columns + state.rows; i += threads) {
    const bool is_query = i < state.columns;
    const bool is_value = i >= 2 * state.columns;
    const uint at = is_query ? i : is_value ? i - 2 * state.columns : i - state.columns;
    const T x = is_query ? q[at] : is_value ? v[at] : k[at];
    const uint of_keys = state.key_heads * state.columns;
    const uint of_values = state.heads * state.rows;
    uint channel = is_value ? head * state.rows + at : key_head * state.columns + at;
    channel += Apart || is_query ? 0 : is_value ? 2 * of_keys : of_keys;
    const uint channels = !Apart ? 2 * of_keys + of_values : is_value ? of_values : of_keys;
    const size_t conv_at = size_t(sequence) * (params.taps - 1) * channels + channel;
    const bool writes = is_value || head_of_key == 0;
    const device T* before = (!Apart || is_query ? of_q.before : is_value ? of_v.before : of_k.before) + conv_at;
    device T* after = (!Apart || is_query ? of_q.after : is_value ? of_v.after : of_k.after) + conv_at;
    const device T* weight = (!Apart || is_query ? of_q.weight
                              : is_value         ? of_v.weight
                                                 : of_k.weight) +
                             size_t(channel) * params.taps;
    const float sum = params.taps == 4 ? convolution<T, 4>(x, before, weight, after, channels, 4, writes)
                                       : convolution<T, 0>(x, before, weight, after, channels, params.taps, writes);
    const float c = sum * sigmoid(sum);
    threadgroup float* to = is_query ? queries : is_value ? values : keys;
    to[at] = c;
    squares.x += is_query ? c * c : 0.0f;
    squares.y += is_query || is_value ? 0.0f : c * c;
  }
  // Columns beyond the last are multiplied with the state's zeros there.
  for (uint i = state.columns + t; i < kStateValues * state.lanes; i += threads) {
    queries[i] = 0;
    keys[i] = 0;
    if (Apart) {
      memory.gates[i] = 0;
    }
  }
  a += sequence * params.a.sequence + key_head * params.a.key_head + head_of_key * params.a.head;
  const float decay = precise::exp(number(a_log, params.a_log_type, head));
  if (Apart) {
    for (uint i = t; i < state.columns; i += threads) {
      const uint at = gate_per_column ? i : 0;
      const float bias = number(dt_bias, params.dt_bias_type, gate_per_column ? head * state.columns + i : head);
      memory.gates[i] = precise::exp(-(decay * softplus(float(a[at]) + bias)));
    }
  }
  squares = float2(simd_sum(squares.x), simd_sum(squares.y));
  if (lane == 0) {
    partials[simdgroup] = squares.x;
    partials[kTokenSimdgroups + simdgroup] = squares.y;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float query_square = simd_sum(lane < simdgroups ? partials[lane] : 0.0f);
  const float key_square = simd_sum(lane < simdgroups ? partials[kTokenSimdgroups + lane] : 0.0f);
  const float query_scale = precise::rsqrt(query_square + params.key_eps) * precise::rsqrt(float(state.columns));
  const float key_scale = precise::rsqrt(key_square + params.key_eps);

  const size_t rate_at = sequence * params.b.sequence + key_head * params.b.key_head + head_of_key * params.b.head;
  float gate = 0;
  if (!Apart) {
    gate = precise::exp(-(decay * softplus(float(a[0]) + number(dt_bias, params.dt_bias_type, head))));
  }
  const float rate = sigmoid(float(b[rate_at]));

  const uint rows_of_simdgroup = 32 / state.lanes;
  const uint rows_at_once = simdgroups * rows_of_simdgroup;
  const uint part = lane % state.lanes;
  uint row = simdgroup * rows_of_simdgroup + lane / state.lanes;
  const size_t state_at = size_t(group.x) * state.rows * state.columns;
  float result_square = 0;
  for (uint first = 0; first < state.rows; first += rows_at_once) {
    const bool exists = row < state.rows;
    float s[kStateValues];
    if (exists) {
      load_values(state_in + state_at + size_t(row) * state.columns, part, state, s);
    }
    float columns[kStateValues];
    if (Apart) {
      shared_values(memory.gates, part, state.lanes, columns);
    }
#pragma unroll
    for (int i = 0; i < kStateValues; ++i) {
      s[i] = exists ? s[i] * (Apart ? columns[i] : gate) : 0.0f;
    }
    shared_values(keys, part, state.lanes, columns);
    float predicted = 0;
#pragma unroll
    for (int i = 0; i < kStateValues; ++i) {
      predicted = fma(s[i], columns[i], predicted);
    }
    predicted = key_scale * row_sum(predicted, state.lanes);
    const float delta = key_scale * rate * (values[min(row, state.rows - 1)] - predicted);
#pragma unroll
    for (int i = 0; i < kStateValues; ++i) {
      s[i] = fma(delta, columns[i], s[i]);
    }
    shared_values(queries, part, state.lanes, columns);
    float result = 0;
#pragma unroll
    for (int i = 0; i < kStateValues; ++i) {
      result = fma(s[i], columns[i], result);
    }
    result = query_scale * row_sum(result, state.lanes);
    if (exists) {
      store_values(state_out + state_at + size_t(row) * state.columns, part, state, s);
      if (part == 0) {
        results[row] = result;
        result_square = fma(result, result, result_square);
      }
    }
    row += rows_at_once;
  }
  const float square =
      threadgroup_sum(result_square, partials + 2 * kTokenSimdgroups, ThreadPosition{lane, simdgroup, simdgroups});
  const float inverse = rstd(square, state.rows, params.eps);
  for (uint i = t; i < state.rows; i += threads) {
    const float gated = float(z[i]);
    const float normed = results[i] * inverse * number(norm_weight, params.norm_type, i);
    y[size_t(group.x) * state.rows + i] = T(normed * (is_sigmoid ? sigmoid(gated) : gated * sigmoid(gated)));
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32 * kTokenSimdgroups)]] void gated_delta_token(
    const device T* q [[buffer(0)]],                  // [batch, key_heads, columns], as all of these by strides
    const device T* k [[buffer(1)]],                  // [batch, key_heads, columns]
    const device T* v [[buffer(2)]],                  // [batch, key_heads, heads / key_heads, rows]
    const device T* z [[buffer(3)]],                  // [batch, key_heads, heads / key_heads, rows]
    const device T* a [[buffer(4)]],                  // [batch, key_heads, heads / key_heads]
    const device T* b [[buffer(5)]],                  // [batch, key_heads, heads / key_heads]
    const device T* conv_state [[buffer(6)]],         // [batch, taps - 1, channels], of q, of k and of v
    const device T* conv_weight [[buffer(7)]],        // [channels, taps]
    const device ushort* a_log [[buffer(8)]],         // [heads], of a_log_type
    const device ushort* dt_bias [[buffer(9)]],       // [heads], of dt_bias_type
    const device ushort* norm_weight [[buffer(10)]],  // [rows], of norm_type
    const device float* state_in [[buffer(11)]],      // [batch, heads, rows, columns]
    device T* y [[buffer(12)]],                       // [batch, heads, rows]
    device T* conv_out [[buffer(13)]],                // [batch, taps - 1, channels]
    device float* state_out [[buffer(14)]],           // [batch, heads, rows, columns]
    constant GatedDeltaTokenParams& params [[buffer(15)]], thread_of_simdgroups) {
  threadgroup float queries[kMostStateColumns];
  threadgroup float keys[kMostStateColumns];
  threadgroup float values[kMostTokenRows];
  threadgroup float results[kMostTokenRows];
  threadgroup float partials[3 * kTokenSimdgroups];
  const Channels<T> all = {conv_state, conv_weight, conv_out};
  token_of_head<T, false>(
      q, k, v, z, a, b, all, all, all, a_log, dt_bias, norm_weight, state_in, y, state_out, params, false, false,
      HeadMemory{queries, keys, values, results, partials, queries}, group, t, lane, simdgroup, simdgroups);
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(32 * kTokenSimdgroups)]] void gated_delta_token_apart(
    const device T* q [[buffer(0)]],                  // [batch, key_heads, columns], as all of these by strides
    const device T* k [[buffer(1)]],                  // [batch, key_heads, columns]
    const device T* v [[buffer(2)]],                  // [batch, key_heads, heads / key_heads, rows]
    const device T* z [[buffer(3)]],                  // [batch, key_heads, heads / key_heads, rows]
    const device T* a [[buffer(4)]],                  // [batch, key_heads, heads / key_heads], or one for each column
    const device T* b [[buffer(5)]],                  // [batch, key_heads, heads / key_heads]
    const device T* q_state [[buffer(6)]],            // [batch, taps - 1, channels of q]
    const device T* k_state [[buffer(7)]],            // [batch, taps - 1, channels of k]
    const device T* v_state [[buffer(8)]],            // [batch, taps - 1, channels of v]
    const device T* q_weight [[buffer(9)]],           // [channels of q, taps]
    const device T* k_weight [[buffer(10)]],          // [channels of k, taps]
    const device T* v_weight [[buffer(11)]],          // [channels of v, taps]
    const device ushort* a_log [[buffer(12)]],        // [heads], of a_log_type
    const device ushort* dt_bias [[buffer(13)]],      // [heads] or [heads, columns], of dt_bias_type
    const device ushort* norm_weight [[buffer(14)]],  // [rows], of norm_type
    const device float* state_in [[buffer(15)]],      // [batch, heads, rows, columns]
    device T* y [[buffer(16)]],                       // [batch, heads, rows]
    device T* q_out [[buffer(17)]],                   // [batch, taps - 1, channels of q]
    device T* k_out [[buffer(18)]],                   // [batch, taps - 1, channels of k]
    device T* v_out [[buffer(19)]],                   // [batch, taps - 1, channels of v]
    device float* state_out [[buffer(20)]],           // [batch, heads, rows, columns]
    constant GatedDeltaTokenApartParams& params [[buffer(21)]], thread_of_simdgroups) {
  threadgroup float queries[kMostStateColumns];
  threadgroup float keys[kMostStateColumns];
  threadgroup float gates[kMostStateColumns];
  threadgroup float values[kMostTokenRows];
  threadgroup float results[kMostTokenRows];
  threadgroup float partials[3 * kTokenSimdgroups];
  token_of_head<T, true>(
      q, k, v, z, a, b, Channels<T>{q_state, q_weight, q_out}, Channels<T>{k_state, k_weight, k_out},
      Channels<T>{v_state, v_weight, v_out}, a_log, dt_bias, norm_weight, state_in, y, state_out, params.token,
      params.gate_per_column, params.is_sigmoid, HeadMemory{queries, keys, values, results, partials, gates}, group, t,
      lane, simdgroup, simdgroups);
}

instantiate_types("gated_delta_token", gated_delta_token)
instantiate_types("gated_delta_token_apart", gated_delta_token_apart)
