// A token of a short convolution with gates before and after it, as LFM2 has it:
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
    const device T* projected [[buffer(0)]],  // [batch, 3, channels]
    const device T* conv_state [[buffer(1)]],  // [batch, taps - 1, channels]
    const device T* conv_weight [[buffer(2)]],  // [channels, taps]
    const device T* conv_bias [[buffer(3)]],  // [channels]
    device T* y [[buffer(4)]],  // [batch, channels]
    device T* conv_out [[buffer(5)]],  // [batch, taps - 1, channels]
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

instantiate_types("short_conv_token", short_conv_token)
