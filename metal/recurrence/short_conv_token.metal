// A token of a short convolution with gates before and after it, as LFM2 has it, or several:
//
//   window = [conv_state; b * x];   y = c * (sum_j window[j] * conv_weight[:, j] + conv_bias);   conv_state =
//   window[1:]
//
// b, c and x are the thirds of a projection. b * x has the type's numbers, as the state that keeps it. A thread has a
// channel. A state that is written in place is read by the pointer that writes it: no argument may alias another.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/pack.h"
#include "params/recurrence.h"
#include "recurrence/convolution.h"

using namespace metal;
using namespace mittens;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(kShortConvThreads)]] void short_conv_token(
    const device T* projected [[buffer(0)]],    // [batch, 3, channels]
    const device T* conv_state [[buffer(1)]],   // [batch, taps - 1, channels]
    const device T* conv_weight [[buffer(2)]],  // [channels, taps]
    const device T* conv_bias [[buffer(3)]],    // [channels]
    device T* y [[buffer(4)]],                  // [batch, channels]
    device T* conv_out [[buffer(5)]],           // [batch, taps - 1, channels]
    constant ShortConvTokenParams& params [[buffer(6)]], uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  const uint channel = group.x * kShortConvThreads + t;
  if (channel >= params.channels) {
    return;
  }
  const uint sequence = group.y;
  const size_t channels = params.channels;
  projected += sequence * 3 * channels + channel;
  const size_t at = sequence * (params.taps - 1) * channels + channel;
  const T x = T(float(projected[0]) * float(projected[2 * channels]));
  const device T* weight = conv_weight + size_t(channel) * params.taps;
  const device T* before = (params.in_place ? conv_out : conv_state) + at;
  float sum = params.taps == 3 ? convolution<T, 3>(x, before, weight, conv_out + at, channels, 3, true)
                               : convolution<T, 0>(x, before, weight, conv_out + at, channels, params.taps, true);
  if (params.has_bias) {
    sum += float(conv_bias[channel]);
  }
  y[sequence * channels + channel] = T(float(projected[channels]) * sum);
}

// b * x of a token; those before the first one are the state's.
template <typename T>
inline float window_at(
    const device T* projected, const device T* state, int token, constant ShortConvTokenParams& params) {
  const size_t channels = params.channels;
  if (token < 0) {
    return float(state[size_t(token + int(params.taps) - 1) * channels]);
  }
  const device T* b = projected + size_t(token) * 3 * channels;
  return float(T(float(b[0]) * float(b[2 * channels])));
}

// The same of kShortConvTokens tokens of a channel for each thread, each with the bits that it has alone: its own term
// comes first, then the window's in their order. The last tokens leave the state.
template <typename T>
[[kernel, max_total_threads_per_threadgroup(kShortConvThreads)]] void short_conv_tokens(
    const device T* projected [[buffer(0)]],    // [batch, tokens, 3, channels]
    const device T* conv_state [[buffer(1)]],   // [batch, taps - 1, channels]
    const device T* conv_weight [[buffer(2)]],  // [channels, taps]
    const device T* conv_bias [[buffer(3)]],    // [channels]
    device T* y [[buffer(4)]],                  // [batch, tokens, channels]
    device T* conv_out [[buffer(5)]],           // [batch, taps - 1, channels]
    constant ShortConvTokenParams& params [[buffer(6)]], uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  const uint channel = group.x * kShortConvThreads + t;
  if (channel >= params.channels) {
    return;
  }
  const size_t channels = params.channels;
  const int past = int(params.taps) - 1;
  projected += size_t(group.z) * params.tokens * 3 * channels + channel;
  y += size_t(group.z) * params.tokens * channels + channel;
  conv_state += size_t(group.z) * past * channels + channel;
  conv_out += size_t(group.z) * past * channels + channel;
  const device T* weight = conv_weight + size_t(channel) * params.taps;
  const float bias = params.has_bias ? float(conv_bias[channel]) : -0.0f;  // which leaves the sign of a zero
  const int begin = int(group.y) * kShortConvTokens;
  const int end = min(begin + kShortConvTokens, int(params.tokens));
  if (past == 2) {
    const float3 taps = float3(float(weight[0]), float(weight[1]), float(weight[2]));
    float first = window_at(projected, conv_state, begin - 2, params);
    float second = window_at(projected, conv_state, begin - 1, params);
    for (int token = begin; token < end; ++token) {
      const float third = window_at(projected, conv_state, token, params);
      const float sum = fma(second, taps.y, fma(first, taps.x, third * taps.z)) + bias;
      y[size_t(token) * channels] = T(float(projected[(size_t(token) * 3 + 1) * channels]) * sum);
      first = second;
      second = third;
    }
  } else {
    for (int token = begin; token < end; ++token) {
      float sum = window_at(projected, conv_state, token, params) * float(weight[past]);
      for (int j = 0; j < past; ++j) {
        sum = fma(window_at(projected, conv_state, token - past + j, params), float(weight[j]), sum);
      }
      y[size_t(token) * channels] = T(float(projected[(size_t(token) * 3 + 1) * channels]) * (sum + bias));
    }
  }
  if (end == int(params.tokens)) {
    for (int j = 0; j < past; ++j) {
      conv_out[size_t(j) * channels] = T(window_at(projected, conv_state, end - past + j, params));
    }
  }
}

instantiate_types("short_conv_token", short_conv_token)
instantiate_types("short_conv_token_several", short_conv_tokens)
