// Copies of a cache's buffers that an append could not take over: inputs 1 to `count` of it, and the outputs of the
// same places.
#pragma once

#include <functional>
#include <vector>

#include "backends/launch.h"
#include "runtime/primitive.h"

namespace mittens {

std::vector<Launch> buffer_copies(const Arrays& inputs, const Arrays& outputs, size_t count);

// The same on a CPU, to be called before the append.
std::function<void()> native_buffer_copies(const Arrays& inputs, Arrays& outputs, size_t count);

}  // namespace mittens
