// Softmax over the last axis on the CPU. Arrays are row contiguous and of one type; float32 inside, rounded once.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

// A row of all -inf, and a row with NaN or +inf in it, gives NaN. y may be x.
void softmax(Type type,
             const void* x,  // [rows, columns]
             void* y,  // [rows, columns]
             size_t rows, size_t columns);

// dx = y * (dy - sum(y * dy) / sum(y)).
void softmax_vjp(Type type,
                 const void* y,  // [rows, columns]
                 const void* dy,  // [rows, columns]
                 void* dx,  // [rows, columns], may be y or dy
                 size_t rows, size_t columns);

}  // namespace mittens::cpu
