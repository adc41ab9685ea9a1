// Gradients of rms_norm, add_rms_norm and layer_norm by metal/norm/norm_vjp.metal.
#pragma once

#include <optional>

#include "mlx/array.h"
#include "ops/norm/weight_offset.h"
#include "runtime/primitive.h"

namespace mittens {

// The norm, and the gradients that are asked for.
struct NormVjpOptions {
  bool centred = false;  // layer_norm; else rms_norm
  float eps;
  bool weight_gradient = false;
  bool bias_gradient = false;
  float weight_offset = no_offset;

  bool operator==(const NormVjpOptions&) const = default;
};

struct NormGradients {
  mx::array x;
  std::optional<mx::array> weight;  // these two where they are asked for
  std::optional<mx::array> bias;
};

// x, dy and dsum have one shape, all arrays one dtype. dsum, the cotangent of add_rms_norm's sum, is added to x's
// gradient.
NormGradients norm_gradients(const mx::array& x, const std::optional<mx::array>& weight, const mx::array& dy,
                             const std::optional<mx::array>& dsum, NormVjpOptions options, mx::Stream stream);

}  // namespace mittens
