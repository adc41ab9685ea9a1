// Memory of an NVIDIA GPU for an output, in the order of its stream.
#pragma once

#include "mlx/array.h"
#include "mlx/stream.h"

namespace mittens::mlx_internals {

void allocate_on_device(mlx::core::array& output, mlx::core::Stream stream);

}  // namespace mittens::mlx_internals
