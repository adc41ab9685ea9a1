// The activation of a gate in a feed-forward part.
#pragma once

#include <metal_stdlib>

namespace mittens {

// gate * sigmoid(gate * (alpha + beta * gate^2)): of SiLU beta is 0, GELU's approximation has both.
inline float activate(float gate, float alpha, float beta) {
  const float square = metal::min(gate * gate, FLT_MAX);  // finite: a beta of 0 takes it out
  return gate / (1.0f + metal::precise::exp(-gate * (alpha + beta * square)));
}

}  // namespace mittens
