// Memory on the device of a stream: for the outputs of a primitive, and for its workspaces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/launch.h"

namespace mittens {

// The bytes that a view spans, and the offset of its lowest element from its first. A view without elements spans none.
struct Span {
  int64_t offset;
  size_t bytes;
};
Span span_of(const mx::array& view);

void allocate_output(mx::array& output, mx::Stream stream);

// Holds arrays until the work given to the stream so far is done.
void keep_until_done(std::vector<mx::array> arrays, mx::Stream stream);

// Memory that lives until the work given to the stream so far is done, and the same primitive's next work:
// MLX commits its work between primitives.
mx::array temporary(const mx::Shape& shape, mx::Dtype dtype, mx::Stream stream);

}  // namespace mittens
