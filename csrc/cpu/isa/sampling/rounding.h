// Single numbers as the elements of an array have them.
#pragma once

#include "cpu/isa/row_op.h"

namespace mittens::cpu::MITTENS_ISA {

template <typename T>
MITTENS_INLINE float round_one(float v) {
  alignas(64) T rounded[unit];
  store(rounded, Floats{Float{} + v, Float{} + v});
  return load_in_order(rounded)[0];
}

template <typename T>
MITTENS_INLINE void store_one(T* p, float v) {
  store(p, Floats{Float{} + v, Float{} + v}, Some{1});
}

}  // namespace mittens::cpu::MITTENS_ISA
