// Results of threadgroups that may share them with others, which then leave partial sums to be added by split_sum.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace mittens {

// Where a threadgroup writes. Alone it rounds to T; of several, each has a plane of floats in the same buffer.
struct SplitPlace {
  uint split;
  uint splits;
  size_t plane;  // elements of y
  bool has_bias;
};

template <typename T>
inline void store_split(device T* y, size_t index, float sum, const device T* bias, uint output, SplitPlace place) {
  if (place.splits > 1) {
    ((device float*)y)[place.split * place.plane + index] = sum;
  } else {
    y[index] = T(place.has_bias ? sum + float(bias[output]) : sum);
  }
}

}  // namespace mittens
