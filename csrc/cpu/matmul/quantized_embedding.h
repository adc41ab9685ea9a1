// Rows of a quantized matrix on the CPU, in the formats of mx.quantize, rounded as mx.dequantize does.
#pragma once

#include "cpu/matmul/quantized_matmul.h"

namespace mittens::cpu {

// y[i] = row indices[i] of w; where is_signed, indices are int32 and count from the end below zero. An index out of
// range gives a row of NaN.
void quantized_embedding(Type type,  // of y; affine: of scales and biases too
                         const QuantizedWeights& w,  // [rows, columns]; affine: 1 bit too
                         const uint32_t* indices, bool is_signed, size_t count, size_t rows, size_t columns, void* y);

}  // namespace mittens::cpu
