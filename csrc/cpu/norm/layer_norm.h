// Layer normalisation on the CPU. Arrays are row contiguous and of one type; mean and variance are in float32.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

// y = round((x - mean) / sqrt(variance + eps)) * weight + bias, rounded after each step. y may be x.
void layer_norm(Type type,
                const void* x,  // [rows, columns]
                const void* weight,  // [columns] or nullptr
                const void* bias,  // [columns] or nullptr
                void* y,  // [rows, columns]
                size_t rows, size_t columns, float eps);

void layer_norm_vjp(Type type,
                    const void* x,  // [rows, columns]
                    const void* weight,  // [columns] or nullptr
                    const void* dy,  // [rows, columns]
                    void* dx,  // [rows, columns], may be x or dy
                    void* dweight,  // [columns] or nullptr
                    void* dbias,  // [columns] or nullptr
                    size_t rows, size_t columns, float eps);

}  // namespace mittens::cpu
