// A token of a short convolution, as the ops call it.
#pragma once

#include <optional>
#include <utility>

#include "mlx/utils.h"
#include "runtime/primitive.h"

namespace mittens {

// y, and the next state.
std::pair<mx::array, mx::array> short_conv_token(const mx::array& projected, const mx::array& conv_state,
                                                 const mx::array& conv_weight,
                                                 const std::optional<mx::array>& conv_bias, mx::StreamOrDevice where);

}  // namespace mittens
