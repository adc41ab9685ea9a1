// Pairs of an input and a chosen matrix, from indices that nothing has checked.
#pragma once

#include <metal_stdlib>

#include "params/moe.h"

using namespace metal;

namespace mittens {

struct Pair {
  uint matrix;
  uint input;
  bool is_valid;  // else neither is to be read
};

inline Pair pair_of(const device uint* matrices, const device uint* inputs, constant PairParams& params, uint p) {
  Pair pair;
  pair.matrix = matrices[p];
  pair.input = params.has_inputs ? inputs[p] : p / params.pairs_per_input;
  pair.is_valid = pair.matrix < params.matrices && pair.input < params.inputs;
  return pair;
}

// A weight of a sum, in float32 or of T.
template <typename T>
inline float weight_of_sum(const device float* weights, uint weights_of_sum, size_t p) {
  return weights_of_sum == kWeightsOfX ? float(((const device T*)weights)[p]) : weights[p];
}

// The result of an invalid pair. As bits: compilers may assume that arithmetic gives no NaN.
inline float not_a_number() {
  return as_type<float>(0x7fc00000u);
}

}  // namespace mittens
