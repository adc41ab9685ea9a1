// Operations of MLX that run inside the evaluation of a primitive, where MLX cannot start another evaluation.
#pragma once

#include "runtime/primitive.h"

namespace mittens {

// Computes results on the stream, on which all of their operations have to be, and gives them to the outputs, whose
// shapes and dtypes they must have. who: for messages, with `maker`, the function that returned the results.
void evaluate_inside(const char* who, const char* maker, const Arrays& results, Arrays& outputs, mx::Stream stream);

}  // namespace mittens
