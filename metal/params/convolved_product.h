// Parameters of a product whose outputs a short convolution takes. Compiled by C++ and by Metal.
#pragma once

#include "params/matmul.h"

namespace mittens {

enum { kConvolvedChannels = 2 };  // of a simdgroup, of each third of the outputs

struct ConvolvedProductParams {
  QuantizedParams weights;  // whose outputs are the channels
  NormParams norm;
  uint32_t taps;
  uint32_t has_bias;  // of the convolution
  uint32_t in_place;  // whether the state is
};

}  // namespace mittens
