// A token of a causal convolution, each channel with itself in the tokens before.
#pragma once

#include "cpu/isa/recurrence/recurrence_rows.h"
#include "cpu/recurrence/token_layers.h"

namespace mittens::cpu::MITTENS_ISA {

// Its state before and after, and its weights.
template <typename T>
struct Convolution {
  const T* before;  // [taps - 1, channels] of a sequence, `stride` apart
  const T* weight;  // [channels, taps]
  const T* bias;  // [channels], or null
  T* after;  // likewise, `after_stride` apart
  int64_t stride;
  int64_t after_stride;
  size_t taps;

  // Numbers of memory for the weights of n channels.
  size_t memory_of(size_t n) const {
    return 2 * taps * padded_width(n);
  }
};

// The convolution of a layer with one state of all its channels.
template <typename T>
Convolution<T> convolution_of(const TokenConvolution& all, size_t sequence, size_t channels, size_t taps) {
  const size_t at = sequence * (taps - 1) * channels;
  const auto stride = static_cast<int64_t>(channels);
  return {
      (const T*)all.before + at, (const T*)all.weight, (const T*)all.bias, (T*)all.after + at, stride, stride, taps};
}

// The weights of n channels from `channel` on, by tap, padded with zeros to whole vectors; in memory, which memory_of
// has the size of.
template <typename T>
MITTENS_INLINE const float* weights_by_tap(const Convolution<T>& c, size_t channel, size_t n, float* memory) {
  const size_t stride = padded_width(n);
  float* by_tap = memory + c.taps * stride;
  widened(c.weight + channel * c.taps, n * c.taps, memory);
  for (size_t j = 0; j < c.taps; ++j) {
    for (size_t i = 0; i < n; ++i) {
      by_tap[j * stride + i] = memory[i * c.taps + j];
    }
    for (size_t i = n; i < stride; ++i) {
      by_tap[j * stride + i] = 0;
    }
  }
  return by_tap;
}

// The sums of n channels from `channel` on, put through `finish` and padded to whole vectors.
template <typename T, typename Finish>
MITTENS_INLINE void convolve(const Convolution<T>& c, size_t channel, const T* x, size_t n, bool writes,
                             const float* by_tap, float* out, const Finish& finish) {
  const size_t stride = padded_width(n), past = c.taps - 1;
  each_vector(n, [&](size_t i, auto part) MITTENS_INLINED {
    const Float now = load_in_order(x + i, part);
    Float sum = now * read<Float>(by_tap + past * stride + i, All());
    for (size_t j = 0; j < past; ++j) {
      const Float earlier = load_in_order(c.before + static_cast<int64_t>(j) * c.stride + channel + i, part);
      sum = fma(earlier, read<Float>(by_tap + j * stride + i, All()), sum);
      if (writes && j > 0) {
        store_in_order(c.after + static_cast<int64_t>(j - 1) * c.after_stride + channel + i, earlier, part);
      }
    }
    if (writes && past > 0) {
      store_in_order(c.after + static_cast<int64_t>(past - 1) * c.after_stride + channel + i, now, part);
    }
    if (c.bias) {
      sum += load_in_order(c.bias + channel + i, part);
    }
    write(out + i, finish(sum), All());
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
