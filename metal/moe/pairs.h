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

// What a pair gives that is not valid. As bits: compilers may take arithmetic to have no NaN.
inline float not_a_number() {
  return as_type<float>(0x7fc00000u);
}

}  // namespace mittens
