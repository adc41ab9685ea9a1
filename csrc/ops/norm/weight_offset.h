// A number that is added to a norm's weight, in float32: Gemma's scale is 1 + weight.
#pragma once

#include <cmath>
#include <optional>

#include "runtime/checks.h"

namespace mittens {

// The offset that changes no number: 0 + -0 would be 0.
inline constexpr float no_offset = -0.0f;

// The offset that an op was given, as kernels add it.
inline float checked_offset(const char* op, const char* name, float offset, const char* weight_name,
                            const std::optional<mx::array>& weight) {
  if (!std::isfinite(offset)) {
    checks::fail(op, name, " is ", offset, ": expected a finite number");
  }
  if (offset != 0 && !weight) {
    checks::fail(op, name, " is ", offset, " and ", weight_name, " is None: expected a weight, or no offset");
  }
  return offset == 0 ? no_offset : offset;
}

}  // namespace mittens
