// Rotary embedding of a head, with a norm before it: shared by the appends to a cache.
#pragma once

#include <metal_stdlib>

#include "mittens/rms.h"
#include "params/cache.h"

using namespace metal;

namespace mittens {

// A head's elements as the rotation takes them.
template <typename T, bool Normed>
struct Head {
  const device T* row;
  const device T* weight;
  float weight_offset;
  float rstd;
  float scale;

  float at(uint column) const {
    const T x = row[column];
    const float y =
        Normed ? round_to<T>(round_to<T>(float(x) * rstd) * (float(weight[column]) + weight_offset)) : float(x);
    return y * scale;
  }
};

// A simdgroup reads the whole head.
template <typename T, bool Normed>
inline Head<T, Normed> load_head(
    const device T* row, const device T* weight, uint width, float scale, constant RopeAppendParams& params,
    uint lane) {
  float inverse = 1.0f;
  if (Normed) {
    float sum = 0;
    for (uint column = lane; column < width; column += 32) {
      const float x = float(row[column]);
      sum += x * x;
    }
    inverse = rstd(simd_sum(sum), width, params.eps);
  }
  return {row, weight, params.weight_offset, inverse, scale};
}

// Of the angle by which a pair turns at a position.
struct Turn {
  float cosine;
  float sine;
};

inline Turn turn_of(uint pair, int at, const device float* freqs, constant RopeAppendParams& params) {
  const float position = params.scale * float(at);
  const float frequency =
      params.has_freqs ? 1.0f / freqs[pair] : precise::exp2(-(float(pair) / float(params.pairs)) * params.log2_base);
  const float angle = position * frequency;
  return {precise::cos(angle), precise::sin(angle)};
}

// The columns of a pair.
struct RopePair {
  uint low;
  uint high;
};

inline RopePair pair_at(uint pair, constant RopeAppendParams& params) {
  const uint low = params.traditional ? 2 * pair : pair;
  return {low, params.traditional ? low + 1 : params.pairs + low};
}

// The columns of a head that a lane turns, from params.begin on: a pair, and the columns that are not rotated.
template <typename T, bool Normed>
inline void rotate_part(
    Head<T, Normed> head, const device float* freqs, device T* target, constant RopeAppendParams& params, int at,
    uint first, uint step) {
  const uint pairs = params.pairs;
  if (first < pairs) {
    const Turn turn = turn_of(first, at, freqs, params);
    const RopePair pair = pair_at(first, params);
    const float x = head.at(pair.low);
    const float y = head.at(pair.high);
    target[pair.low] = T(x * turn.cosine - y * turn.sine);
    target[pair.high] = T(x * turn.sine + y * turn.cosine);
  }
  for (uint column = 2 * pairs + first; column < params.width - params.begin; column += step) {
    target[column] = T(head.at(column));
  }
}

// One column of a head, turned.
template <typename T, bool Normed>
inline T rotated(
    Head<T, Normed> head, const device float* freqs, constant RopeAppendParams& params, int at, uint column) {
  const uint pairs = params.pairs;
  if (column >= 2 * pairs) {
    return T(head.at(column));
  }
  const uint index = params.traditional ? column / 2 : column < pairs ? column : column - pairs;
  const Turn turn = turn_of(index, at, freqs, params);
  const RopePair pair = pair_at(index, params);
  const float x = head.at(pair.low);
  const float y = head.at(pair.high);
  return column == pair.low ? T(x * turn.cosine - y * turn.sine) : T(x * turn.sine + y * turn.cosine);
}

template <typename T>
inline const device T* row_of(
    const device T* heads, constant const int64_t (&strides)[3], uint batch, uint head, uint token) {
  return heads + batch * strides[0] + head * strides[1] + token * strides[2];
}

}  // namespace mittens
