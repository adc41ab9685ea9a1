// A token of a causal convolution, each channel with itself in the tokens before.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace mittens {

// The sum over a channel's window; `taps` is `N` where N is not 0. `before` and `after` are the channel in the states
// [taps - 1, channels]. `writes` moves the window on by this token: in place where nobody else reads the channel.
template <typename T, int N>
inline float convolution(
    T x, const device T* before, const device T* weight, device T* after, size_t channels, uint taps, bool writes) {
  const uint past = (N > 0 ? N : taps) - 1;
  float sum = float(x) * float(weight[past]);
#pragma unroll
  for (uint j = 0; j < past; ++j) {
    const T earlier = before[j * channels];
    sum = fma(float(earlier), float(weight[j]), sum);
    if (writes && j > 0) {
      after[(j - 1) * channels] = earlier;
    }
  }
  if (writes && past > 0) {
    after[(past - 1) * channels] = x;
  }
  return sum;
}

}  // namespace mittens
