// Memory on the device of a stream: for the outputs of a primitive, and for what it needs on the way.
#pragma once

#include <vector>

#include "launch/launch.h"

namespace mittens {

void allocate_output(mx::array& output, mx::Stream stream);

// Holds arrays until what was given to the stream so far is done.
void keep_until_done(std::vector<mx::array> arrays, mx::Stream stream);

// Memory that lives until what was given to the stream so far is done, and what the same primitive gives to it next: MLX
// commits its work between primitives.
mx::array temporary(const mx::Shape& shape, mx::Dtype dtype, mx::Stream stream);

}  // namespace mittens
