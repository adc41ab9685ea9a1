// Affine quantization of a group of columns by a simdgroup, as mx.quantize packs it: the formula is in
// quantized_rope_append.metal.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace mittens {

constant constexpr uint most_values = 4;  // of a group of 128 in a lane

// The integers of a group, with scale and bias.
struct Packed {
  uint word;  // the lane's, of as many as there are
  float scale;
  float bias;
};

// Of the first `count` values in each lane.
inline Packed pack_group(thread const float (&values)[most_values], uint count, uint bits, uint lane) {
  const float levels = float((1u << bits) - 1);
  float low = INFINITY;
  float high = 0;
#pragma unroll
  for (uint i = 0; i < most_values; ++i) {
    if (i < count) {
      low = min(low, values[i]);
      high = max(high, values[i]);
    }
  }
  low = simd_min(low);
  high = simd_max(high);
  const bool is_low = abs(low) > abs(high);
  const float step = max((high - low) / levels, 1e-7f);
  const float edge = is_low ? low : high;
  float scale = is_low ? step : -step;
  const float whole = round(edge / scale);
  const float bias = whole == 0 ? 0.0f : edge;
  scale = whole == 0 ? scale : edge / whole;

  const uint lane_bits = count * bits;
  uint own = 0;
#pragma unroll
  for (uint i = 0; i < most_values; ++i) {
    if (i < count) {
      const float q = max(min(round((values[i] - bias) / scale), levels), 0.0f);
      own |= uint(q) << (i * bits);
    }
  }
  // The word with bits [32 * lane, 32 * lane + 32) of the group, of the lanes that have some of them.
  const uint first = 32 * lane / lane_bits;
  const uint sources = (31 + lane_bits) / lane_bits + 1;
  uint word = 0;
  for (uint i = 0; i < sources; ++i) {
    const uint source = first + i;
    const uint part = simd_shuffle(own, ushort(min(source, 31u)));
    const int at = int(source * lane_bits) - int(32 * lane);
    if (source < 32 && at < 32) {
      word |= at < 0 ? part >> uint(-at) : part << uint(at);
    }
  }
  return {word, scale, bias};
}

}  // namespace mittens
