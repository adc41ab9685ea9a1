#include "cpu/quantized_embedding.h"

#include "cpu/isa/matmul/weights.h"
#include "cpu/isa/rows.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

constexpr size_t most_grouped = 128;  // columns

// The integers of a group, a byte each: 8 of them fill as many bytes as they have bits.
template <int bits>
MITTENS_INLINE void split_integers(const uint8_t* from, size_t size, uint8_t* codes) {
  for (size_t i = 0; i < size / 8; ++i) {
    uint64_t word = 0;
    __builtin_memcpy(&word, from + i * bits, bits);
    for (size_t j = 0; j < 8; ++j) {
      codes[8 * i + j] = static_cast<uint8_t>(word >> (j * bits) & ((1u << bits) - 1));
    }
  }
}

void split_integers(int bits, const uint8_t* from, size_t size, uint8_t* codes) {
  switch (bits) {
    case 1:
      return split_integers<1>(from, size, codes);
    case 2:
      return split_integers<2>(from, size, codes);
    case 3:
      return split_integers<3>(from, size, codes);
    case 4:
      return split_integers<4>(from, size, codes);
    case 5:
      return split_integers<5>(from, size, codes);
    case 6:
      return split_integers<6>(from, size, codes);
    default:
      __builtin_memcpy(codes, from, size);
  }
}

template <typename T>
MITTENS_INLINE Float rounded(Float v) {
  return round<T>(Floats{v, v}).a;
}

// scale * q + bias, the product and the sum rounded.
template <typename T>
MITTENS_INLINE void integral_group(const uint8_t* codes, size_t size, float scale, float bias, T* y) {
  for (size_t i = 0; i < size; i += width) {
    const Float q = __builtin_convertvector((Int)read_bytes(codes + i), Float);
    store_in_order(y + i, rounded<T>(q * scale) + bias);
  }
}

template <typename T>
MITTENS_INLINE void floating_group(const uint8_t* codes, size_t size, int bits, float scale, T* y) {
  for (size_t i = 0; i < size; i += width) {
    const UInt code = read_bytes(codes + i);
    store_in_order(y + i, (bits == 4 ? e2m1(code) : e4m3(code)) * scale);
  }
}

// A byte of exponent; mx has infinity, and no NaN.
float scale_of_byte(uint8_t bits, bool is_power) {
  const UInt all = UInt{} + bits;
  return is_power ? ((Float)(bits == 0 ? UInt{} + 0x00400000 : all << 23))[0] : e4m3(all)[0];
}

template <typename T>
void one_row(const QuantizedWeights& w, size_t n, size_t columns, T* y) {
  alignas(64) uint8_t codes[most_grouped];
  const size_t size = static_cast<size_t>(w.group_size);
  const uint8_t* from = reinterpret_cast<const uint8_t*>(w.words + n * w.words_stride);
  for (size_t group = 0; group < columns / size; ++group) {
    split_integers(w.bits, from + group * size * w.bits / 8, size, codes);
    if (w.mode == QuantizedMode::affine) {
      const float scale = widen_one<T>(w.scales, n * w.scales_stride + group);
      const float bias = widen_one<T>(w.biases, n * w.biases_stride + group);
      integral_group(codes, size, scale, bias, y + group * size);
    } else {
      const uint8_t scale = static_cast<const uint8_t*>(w.scales)[n * w.scales_stride + group];
      const bool is_power = w.mode != QuantizedMode::nvfp4;
      floating_group(codes, size, w.bits, scale_of_byte(scale, is_power), y + group * size);
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
    parallel_for(count, piece, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        T* const to = static_cast<T*>(y) + i * columns;
        const bool from_end = is_signed && static_cast<int32_t>(indices[i]) < 0;
        const uint32_t n = indices[i] + (from_end ? static_cast<uint32_t>(rows) : 0);
        if (n < rows) {
          one_row(w, n, columns, to);
        } else {
          for (size_t k = 0; k < columns; k += 16) {
            for (size_t j = 0; j < 16; j += width) {
              store_in_order(to + k + j, Float{} + __builtin_nanf(""));
            }
          }
        }
      }
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
