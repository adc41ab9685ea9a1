// The source of rows in formats that have none of their own: a row is widened to float32 when it is begun.
#pragma once

#include "cpu/isa/matmul/row_products.h"
#include "cpu/matmul/packed_rows.h"

namespace mittens::cpu::MITTENS_ISA {

struct Unpacked : Dense<float> {
  PackedRows from;

  static constexpr bool scaled = false;
  using Element = void;

  explicit Unpacked(const PackedRows& from) : Dense<float>{}, from(from) {}
  Unpacked(const QuantizedWeights& w, Type type) : Unpacked(packed_rows(w, type)) {}

  // The packed weights, then the unpacked ones.
  size_t memory(size_t size) const {
    return rounded_up(size, unit) + ceil_divide(size, 4) + 2 * (size >> from.group_bits);
  }
  size_t bytes(size_t columns) const {
    return static_cast<size_t>(static_cast<double>(columns) * from.row_bytes);
  }
  size_t stride_bytes() const {
    return 0;  // the next weights are not in memory yet
  }
  Row row(size_t n, size_t begin, size_t size, float* memory) const {
    uint8_t* bytes = reinterpret_cast<uint8_t*>(memory + rounded_up(size, unit));
    float* scales = memory + rounded_up(size, unit) + ceil_divide(size, 4);
    float* offsets = scales + (size >> from.group_bits);
    from.unpack(from, n, begin, size, bytes, scales, offsets);
    for (size_t g = 0; g < size >> from.group_bits; ++g) {
      for (size_t i = g << from.group_bits; i < (g + 1) << from.group_bits; i += width) {
        const UInt each = read_bytes(bytes + i);
        const Float value = from.small_floats ? e4m3(each) : __builtin_convertvector((Int)each, Float) - from.zero;
        write(memory + i, value * scales[g] + offsets[g], All());
      }
    }
    return memory;
  }
};

// gguf.cpp has the products.
extern template void RowProducts<Unpacked>::direct<true>(const float*, size_t, size_t, size_t, float*, size_t, float*,
                                                         bool) const;
extern template void RowProducts<Unpacked>::panel(const float*, size_t, size_t, size_t, float*, size_t, float*) const;

}  // namespace mittens::cpu::MITTENS_ISA
