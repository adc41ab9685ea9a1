#pragma once

#include "cpu/matmul/quantized_matmul.h"

namespace mittens::cpu {

// Parts of quantized_matmul, with an activation of quantized_swiglu, and of block_matmul, for all formats but mxfp8:
// with x as int16 if it is of a half type, or int8 where the mode has it. integer_matmul has few rows,
// integer_panel_matmul many. Either returns whether it takes this number of rows; if so, taken [matrices, rows] says
// for which rows y was written. Integers cannot stand for the others.
bool integer_matmul(Type type, const Activation* activation,  // or nullptr
                    const QuantizedWeights* w,  // [matrices], transposed
                    const QuantizedWeights* up,  // [matrices], with an activation
                    const void* x,  // [matrices, rows, columns]
                    const void* bias,  // [outputs] or nullptr
                    void* y,  // [matrices, rows, outputs]
                    size_t matrices, size_t rows, size_t columns, size_t outputs, ProductMode mode, bool* taken);
bool integer_panel_matmul(Type type, const Activation* activation, const QuantizedWeights* w,
                          const QuantizedWeights* up, const void* x, const void* bias, void* y, size_t matrices,
                          size_t rows, size_t columns, size_t outputs, ProductMode mode, bool* taken);

}  // namespace mittens::cpu
