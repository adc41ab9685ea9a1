// Parts of quantized_swiglu that the patch uses.
#pragma once

#include <optional>

#include "ops/matmul/activation.h"
#include "runtime/primitive.h"

namespace mittens {

// The activation of gate and up, two quantized products that nothing has computed yet, as one: under the patch a model
// multiplies first and then asks for this. Products of more rows than a kernel takes at once stay two, which may go by
// tiles; so do products of a gradient, which would multiply again on its way back.
std::optional<mx::array> try_swiglu(const mx::array& gate, const mx::array& up, const Activation& activation);

}  // namespace mittens
