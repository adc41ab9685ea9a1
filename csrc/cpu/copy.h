// The copy of a strided view into row contiguous memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mittens::cpu {

// target [shape[0], .., shape[dims - 1]] from the view of these strides (in elements) that starts at source.
void copy_strided(const void* source, void* target, size_t item_bytes, const int32_t* shape, const int64_t* strides,
                  size_t dims);

}  // namespace mittens::cpu
