#include "cpu/matmul/quantized_embedding.h"

#include "cpu/isa/matmul/weights.h"
#include "cpu/matmul/packed_rows.h"
#include "cpu/isa/row_op.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

template <typename T>
MITTENS_INLINE Float rounded(Float v) {
  return round<T>(Floats{v, v}).a;
}

// A byte of exponent; mx has infinity, and no NaN.
float scale_of_byte(uint8_t bits, bool is_power) {
  const UInt all = UInt{} + bits;
  return is_power ? ((Float)(bits == 0 ? UInt{} + 0x00400000 : all << 23))[0] : e4m3(all)[0];
}

// scale * q + bias, the product and the sum rounded.
template <typename T>
void affine_row(const PackedRows& from, size_t n, size_t columns, float* memory, T* y) {
  const size_t groups = columns >> from.group_bits, size = size_t{1} << from.group_bits;
  float *scales = memory, *biases = scales + groups;
  uint8_t* bytes = reinterpret_cast<uint8_t*>(biases + groups);
  from.unpack(from, n, 0, columns, bytes, scales, biases);
  for (size_t i = 0; i < columns; i += width) {
    const Float q = __builtin_convertvector((Int)read_bytes(bytes + i), Float) - from.zero;
    store_in_order(y + i, rounded<T>(q * scales[i / size]) + biases[i / size]);
  }
}

template <typename T>
void floating_row(const QuantizedWeights& w, size_t n, size_t columns, uint8_t* codes, T* y) {
  constexpr Bytes16 same = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const uint8_t* from = reinterpret_cast<const uint8_t*>(w.words + n * w.words_stride);
  if (w.bits == 4) {
    unpack_nibbles(from, columns, same, codes);
  } else {
    __builtin_memcpy(codes, from, columns);
  }
  const auto size = static_cast<size_t>(w.group_size);
  const uint8_t* scales = static_cast<const uint8_t*>(w.scales) + n * w.scales_stride;
  for (size_t group = 0; group < columns / size; ++group) {
    const float scale = scale_of_byte(scales[group], w.mode != QuantizedMode::nvfp4);
    for (size_t i = group * size; i < (group + 1) * size; i += width) {
      const UInt code = read_bytes(codes + i);
      store_in_order(y + i, (w.bits == 4 ? e2m1(code) : e4m3(code)) * scale);
    }
  }
}

}  // namespace

void quantized_embedding(Type type, const QuantizedWeights& w, const uint32_t* indices, bool is_signed, size_t count,
                         size_t rows, size_t columns, void* y) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const size_t row_bytes = columns * (sizeof(T) + 1);
    const size_t piece = count * row_bytes <= serial_bytes ? count : ceil_divide(piece_bytes, row_bytes);
    const PackedRows affine = w.mode == QuantizedMode::affine ? packed_rows(w, type) : PackedRows{};
    parallel_for(count, piece, [&](size_t begin, size_t end) {
      // Bytes, and the scales and biases of groups of 32 or more.
      const Scratch memory(ceil_divide(columns, 4) + 2 * ceil_divide(columns, 32));
      for (size_t i = begin; i < end; ++i) {
        T* const to = static_cast<T*>(y) + i * columns;
        const bool from_end = is_signed && static_cast<int32_t>(indices[i]) < 0;
        const uint32_t n = indices[i] + (from_end ? static_cast<uint32_t>(rows) : 0);
        if (n >= rows) {
          for (size_t k = 0; k < columns; k += width) {
            store_in_order(to + k, Float{} + __builtin_nanf(""));
          }
        } else if (affine.unpack) {
          affine_row(affine, n, columns, memory.data(), to);
        } else {
          floating_row(w, n, columns, reinterpret_cast<uint8_t*>(memory.data()), to);
        }
      }
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
