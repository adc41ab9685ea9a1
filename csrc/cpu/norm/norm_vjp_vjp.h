// Derivatives of the gradients of rms_norm and layer_norm on the CPU. Arrays are row contiguous and of one type; sums
// are in float32.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

// Gradients of sum(u * dx) + sum(v * dweight) + sum(b * dbias), where dx, dweight and dbias are the results of
// layer_norm_vjp (centred), or of rms_norm_vjp without dsum.
struct NormVjpVjp {
  const void* x;  // [rows, columns]
  const void* weight;  // [columns] or nullptr
  const void* dy;  // [rows, columns]
  const void* u;  // [rows, columns]
  const void* v;  // [columns] or nullptr
  const void* b;  // [columns] or nullptr
  void* by_x;  // [rows, columns]
  void* by_dy;  // [rows, columns]
  void* by_weight;  // [columns] or nullptr
  size_t rows;
  size_t columns;
  float eps;
  float weight_offset;
  bool centred;
};

void norm_vjp_vjp(Type type, const NormVjpVjp& of);

}  // namespace mittens::cpu
