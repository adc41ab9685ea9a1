// Norms under the patch whose inputs are still to be computed.
#pragma once

#include <optional>

#include "mlx/array.h"
#include "mlx/utils.h"

namespace mittens {

namespace mx = mlx::core;

// rms_norm; where x is a sum that nothing has computed or asked for yet, both are one kernel: add_rms_norm, or
// norm_add_norm where a term of the sum is such a norm itself. x becomes that kernel's sum. None where no kernel covers
// a call.
std::optional<mx::array> try_pending_rms_norm(mx::array& x, const std::optional<mx::array>& weight, float eps,
                                              float weight_offset, mx::StreamOrDevice where);

}  // namespace mittens
