// How a gated feed-forward part joins its two products.
#pragma once

#include <string>

#include "mlx/array.h"

namespace mittens {

namespace mx = mlx::core;

// gate * sigmoid(gate * (alpha + beta * gate^2)) * (up + offset), of values that a limit clips: gate from above, up on
// both sides. With the tangent written as a sigmoid, GELU's approximation is of this form too.
struct Activation {
  const char* name;
  float alpha;
  float beta;
  float limit;
  float offset;

  bool operator==(const Activation& other) const {
    return name == other.name;
  }
  bool is_clipped() const;
};

extern const Activation swiglu_activation, geglu_activation, clipped_activation;

// The one of this name; an error that names `op` where there is none. Clipped ones are for experts alone.
const Activation& activation_of(const char* op, const std::string& name, bool may_be_clipped);

// The same by mx's operations.
mx::array gated(mx::array gate, mx::array up, const Activation& activation, mx::Stream stream);

}  // namespace mittens
