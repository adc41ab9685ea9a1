// What the norms use of each other.
#pragma once

#include <optional>

#include "runtime/primitive.h"

namespace mittens {

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::StreamOrDevice where);

// None where no kernel covers a call.
std::optional<mx::array> try_rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps,
                                      mx::StreamOrDevice where);

// The same as one kernel with a sum that nothing has computed or asked for yet: x becomes that kernel's.
std::optional<mx::array> try_pending_add_rms_norm(mx::array& x, const std::optional<mx::array>& weight, float eps,
                                                  mx::StreamOrDevice where);

// What a norm that nothing has computed yet is of; none where an array is no such thing.
struct PendingRmsNorm {
  mx::array x;
  mx::array weight;
  float eps;
};
std::optional<PendingRmsNorm> pending_rms_norm(const mx::array& y);

// In mx operations, rounded as rms_norm rounds.
mx::array compose_rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::Stream stream);

inline std::optional<mx::array> optional_input(const Arrays& inputs, size_t index) {
  return index < inputs.size() ? std::optional(inputs[index]) : std::nullopt;
}

}  // namespace mittens
