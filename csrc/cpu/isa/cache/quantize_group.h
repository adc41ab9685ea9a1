// Affine quantization of a group of columns.
#pragma once

#include "cpu/isa/row_op.h"

namespace mittens::cpu::MITTENS_ISA {

constexpr size_t largest_group = 128;

// A group as mx.quantize packs it on a CPU: each step rounds to float32, halves to even.
template <typename T>
void quantize_group(const T* x, size_t size, size_t bits, uint32_t* words, T* scale, T* bias) {
  const float levels = static_cast<float>((1 << bits) - 1);
  Float low = Float{} + infinity, high = Float{} - infinity;
  for (size_t i = 0; i < size; i += width) {
    const Float v = load_in_order(x + i);
    low = minimum(v, low);
    high = maximum(v, high);
  }
  const auto smallest = reduce(low, [](auto a, auto b) MITTENS_INLINED { return a < b ? a : b; });
  const auto largest = reduce(high, [](auto a, auto b) MITTENS_INLINED { return a > b ? a : b; });
  const bool is_low = __builtin_fabsf(smallest) > __builtin_fabsf(largest);
  const float range = (largest - smallest) / levels;
  const float step = range > 1e-7f ? range : 1e-7f;
  const float edge = is_low ? smallest : largest;
  float factor = is_low ? step : -step;
  const float whole = __builtin_rintf(edge / factor);
  const float origin = whole != 0 ? edge : 0.0f;
  factor = whole != 0 ? edge / whole : factor;
  float q[largest_group];
  for (size_t i = 0; i < size; i += width) {
    const Float v = nearest((load_in_order(x + i) - origin) / factor);
    write(q + i, minimum(maximum(v, Float{}), Float{} + levels), All());
  }
  uint64_t pending = 0;
  size_t held = 0;  // bits
  for (size_t i = 0; i < size; ++i) {
    pending |= static_cast<uint64_t>(q[i]) << held;
    held += bits;
    if (held >= 32) {
      *words++ = static_cast<uint32_t>(pending);
      pending >>= 32;
      held -= 32;
    }
  }
  store_in_order(scale, Float{} + factor, Some{1});
  store_in_order(bias, Float{} + origin, Some{1});
}

}  // namespace mittens::cpu::MITTENS_ISA
