// What the norms use of each other.
#pragma once

#include <optional>

#include "ops/primitive.h"

namespace mittens {

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::StreamOrDevice where);

// In mx operations, rounded as rms_norm rounds.
mx::array compose_rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::Stream stream);

inline std::optional<mx::array> optional_input(const Arrays& inputs, size_t index) {
  return index < inputs.size() ? std::optional(inputs[index]) : std::nullopt;
}

}  // namespace mittens
