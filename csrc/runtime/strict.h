// Strict patches: mlx_mittens.patch(strict=True).
#pragma once

namespace mittens {

// Whether a patch is on for which a call that mx computes is an error.
bool has_strict_patch();

}  // namespace mittens
