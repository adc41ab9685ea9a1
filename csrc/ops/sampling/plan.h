// How the rows of logits are shared out. All that depends on the GPU is here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "mlx/stream.h"

namespace mittens {

namespace mx = mlx::core;

// How many threadgroups share a row of `packs` of 16 bytes.
uint32_t plan_sample_splits(size_t rows, uint32_t packs, mx::Stream stream);

}  // namespace mittens
