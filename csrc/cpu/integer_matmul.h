#pragma once

#include "cpu/quantized_matmul.h"

namespace mittens::cpu {

// Part of quantized_matmul, and with an activation of quantized_swiglu, for half types and affine integers of 4 and 8
// bits: with x as int16. Returns whether it takes this number of rows; if so, taken [matrices, rows] says for which
// rows y was written. The others have elements that int16 cannot stand for.
bool integer_matmul(Type type, const Activation* activation,  // or nullptr
                    const QuantizedWeights* w,  // [matrices], transposed
                    const QuantizedWeights* up,  // [matrices], with an activation
                    const void* x,  // [matrices, rows, columns]
                    const void* bias,  // [outputs] or nullptr
                    void* y,  // [matrices, rows, outputs]
                    size_t matrices, size_t rows, size_t columns, size_t outputs, bool exact, bool* taken);

}  // namespace mittens::cpu
