// A token of a short convolution with the projection before it, which reads a norm (matmul/normed_row.h):
//
//   b, c, x = the thirds of  sum_k row[k] * w[n, k];   y, conv_state = as in recurrence/short_conv_token.metal
//
// A simdgroup has kConvolvedChannels channels of all thirds: their sums need no memory. A state that is written in place
// is read by the pointer that writes it: no argument may alias another.
#include <metal_stdlib>

#include "matmul/normed_row.h"
#include "matmul/quantized_rows.h"
#include "matmul/row_products.h"
#include "mittens/instantiate.h"
#include "params/convolved_product.h"
#include "recurrence/convolution.h"

using namespace metal;
using namespace mittens;

template <typename T, QuantizedFormat F>
[[kernel, max_total_threads_per_threadgroup(256)]] void short_conv_product(
    const device float* row [[buffer(0)]],        // [columns]
    quantized_matrix(w, 1, 2, 3, ScaleOf<T, F>),  // [3 * channels, columns]
    const device float* squares [[buffer(4)]],    // [blocks]
    const device T* conv_state [[buffer(5)]],     // [taps - 1, channels]
    const device T* conv_weight [[buffer(6)]],    // [channels, taps]
    const device T* conv_bias [[buffer(7)]],      // [channels]
    device T* y [[buffer(8)]],                    // [channels]
    device T* conv_out [[buffer(9)]],             // [taps - 1, channels]
    constant ConvolvedProductParams& params [[buffer(10)]], thread_of_plane) {
  using Rows = QuantizedRows<T, F, kRunColumns>;
  constexpr int R = kConvolvedChannels;
  constexpr int C = 4 * R;  // with sums of nothing, since a simdgroup shares out a power of two
  threadgroup float partials[kProductSimdgroups * C];
  const uint channels = params.weights.outputs;
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const OwnOutputs outputs = outputs_of<R>(channels, group.x * threads.y + thread_at.y);
  const NormedRow<T> normed = {row, params.weights.columns};
  const typename Rows::Source matrix = Rows::of(w, w_scales, w_biases, params.weights, 0);
  const typename Rows::Source thirds[3] = {
      matrix.at(outputs.first, outputs.alone), matrix.at(channels + outputs.first, outputs.alone),
      matrix.at(2 * channels + outputs.first, outputs.alone)};
  float sums[3 * R];
  dot_rows<3, R, 1>(normed, thirds, at, sums);
  float totals[C] = {};
#pragma unroll
  for (int i = 0; i < 3 * R; ++i) {
    totals[i] = sums[i];
  }
  const float total = sum_of_sharers(totals, at, partials);
  const float n = norm_of_row(squares, params.weights.columns, params.norm, lane);
  const float projected = float(T(normed_sum(total, n, normed, lane)));
  const float c = simd_shuffle_down(projected, ushort(8));
  const float x = simd_shuffle_down(projected, ushort(16));
  const uint channel = outputs.first + lane / (32 / C);
  if (!writes<C>(at, outputs, channel) || lane >= 8) {
    return;
  }
  const T bx = T(projected * x);
  const device T* weight = conv_weight + size_t(channel) * params.taps;
  const device T* before = (params.in_place ? conv_out : conv_state) + channel;
  float sum = params.taps == 3 ? convolution<T, 3>(bx, before, weight, conv_out + channel, channels, 3, true)
                               : convolution<T, 0>(bx, before, weight, conv_out + channel, channels, params.taps, true);
  if (params.has_bias) {
    sum += float(conv_bias[channel]);
  }
  y[channel] = T(c * sum);
}

instantiate_common("short_conv_token_product", short_conv_product)
