// Packed keys or values, unpacked to arrays.
#pragma once

#include "runtime/primitive.h"

namespace mittens {

// From words, scales and biases of 4 or 8 bits, in the scales' type: float16 or bfloat16.
mx::array unpacked_rows(const Arrays& packed, int group_size, int bits, mx::Stream stream);

}  // namespace mittens
