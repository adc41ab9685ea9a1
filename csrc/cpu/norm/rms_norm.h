// Root mean square normalisation on the CPU. Arrays are row contiguous and of one type; sums are in float32.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

// y = round(x / sqrt(mean(x^2) + eps)) * (weight + weight_offset), rounded again. y may be x.
void rms_norm(Type type,
              const void* x,  // [rows, columns]
              const void* weight,  // [columns] or nullptr
              void* y,  // [rows, columns]
              size_t rows, size_t columns, float eps, float weight_offset);

// sum = round(x + residual); y = rms_norm(sum). Either output may be either input.
void add_rms_norm(Type type,
                  const void* x,  // [rows, columns]
                  const void* residual,  // [rows, columns]
                  const void* weight,  // [columns] or nullptr
                  void* y,  // [rows, columns]
                  void* sum,  // [rows, columns]
                  size_t rows, size_t columns, float eps, float weight_offset);

// Gradients of rms_norm; with dsum, of add_rms_norm, x being the sum: dx for its x and its residual
// alike.
void rms_norm_vjp(Type type,
                  const void* x,  // [rows, columns]
                  const void* weight,  // [columns] or nullptr
                  const void* dy,  // [rows, columns]
                  const void* dsum,  // [rows, columns], added to dx, or nullptr
                  void* dx,  // [rows, columns], may be x, dy or dsum
                  void* dweight,  // [columns] or nullptr
                  size_t rows, size_t columns, float eps, float weight_offset);

}  // namespace mittens::cpu
