// Differences between the releases of MLX that an extension is compiled for, by the version in MLX's own header: the
// private parts that are known, and the public functions that are missing.
#pragma once

#include "mlx/version.h"

// The releases whose arrays and streams buffer_ownership was checked against, and the newest of them.
#define MITTENS_KNOWN_MLX (MLX_VERSION_NUMERIC >= 31002 && MLX_VERSION_NUMERIC <= 32004)
#define MITTENS_KNOWN_MLX_VERSION "0.32.4"

// From this release on an array's memory says whether MLX's allocator owns it.
#define MITTENS_MLX_KNOWS_OWNED_MEMORY (MLX_VERSION_NUMERIC >= 32004)
// From this release on there is mx.fast.gated_delta_update.
#define MITTENS_MLX_HAS_GATED_DELTA_UPDATE (MLX_VERSION_NUMERIC >= 32003)
// From this release on mx.fast.scaled_dot_product_attention takes force_fused.
#define MITTENS_MLX_HAS_FORCE_FUSED (MLX_VERSION_NUMERIC >= 32002)

#define MITTENS_TEXT_OF(number) #number
#define MITTENS_TEXT(number) MITTENS_TEXT_OF(number)
#define MITTENS_MLX_VERSION \
  MITTENS_TEXT(MLX_VERSION_MAJOR) "." MITTENS_TEXT(MLX_VERSION_MINOR) "." MITTENS_TEXT(MLX_VERSION_PATCH)
