#include "cpu/matmul/packed_rows.h"

#include "cpu/isa/matmul/unpack_blocks.h"
#include "cpu/isa/matmul/weights.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

// Without AVX2 all formats are unpacked (quantized_products.h), 8 bits as they are.
template <int bits>
void unpack_affine(const PackedRows& from, size_t n, size_t begin, size_t size, uint8_t* to, float* scales,
                   float* offsets) {
  const uint8_t* row = from.rows + n * from.row_stride + begin * bits / 8;
  if constexpr (bits == 8) {
    __builtin_memcpy(to, row, size);
  } else {
    unpack_bits<bits>(row, size, to);
  }
  const size_t first = begin >> from.group_bits;
  with_type(from.type, [&](auto t) {
    using T = decltype(t);
    const T* s = static_cast<const T*>(from.scales) + n * from.scales_stride + first;
    const T* b = static_cast<const T*>(from.biases) + n * from.biases_stride + first;
    each_vector(size >> from.group_bits, [&](size_t i, auto part) MITTENS_INLINED {
      write(scales + i, load_in_order(s + i, part), part);
      write(offsets + i, load_in_order(b + i, part), part);
    });
  });
}

// powers: scales are E8M0 of 32 weights, and not E4M3 of 16.
template <int bits, bool powers>
void unpack_small_floats(const PackedRows& from, size_t n, size_t begin, size_t size, uint8_t* to, float* scales,
                         float* offsets) {
  constexpr size_t group = powers ? 32 : 16;
  const uint8_t* row = from.rows + n * from.row_stride + begin * bits / 8;
  if constexpr (bits == 8) {
    __builtin_memcpy(to, row, size);
  } else {
    unpack_nibbles(row, size, fp4_bytes, to);
  }
  const uint8_t* s = static_cast<const uint8_t*>(from.scales) + n * from.scales_stride + begin / group;
  constexpr float size_of_one = bits == 4 ? 0.5f : 1;  // bytes are twice the floats of 4 bits
  each_vector(size / group, [&](size_t i, auto part) MITTENS_INLINED {
    uint8_t some[width] = {};
    for (size_t j = 0; j < smaller(width, size / group - i); ++j) {
      some[j] = s[i + j];
    }
    const UInt bytes = read_bytes(some);
    write(scales + i, (powers ? e8m0(bytes) : e4m3(bytes)) * size_of_one, part);
    write(offsets + i, -Float{}, part);
  });
}

PackedRows::Unpack unpack_of(const QuantizedWeights& w) {
  switch (w.mode) {
    case QuantizedMode::affine:
      switch (w.bits) {
        case 1:
          return &unpack_affine<1>;
        case 2:
          return &unpack_affine<2>;
        case 3:
          return &unpack_affine<3>;
        case 4:
          return &unpack_affine<4>;
        case 5:
          return &unpack_affine<5>;
        case 6:
          return &unpack_affine<6>;
        default:
          return &unpack_affine<8>;
      }
    case QuantizedMode::mxfp4:
      return &unpack_small_floats<4, true>;
    case QuantizedMode::nvfp4:
      return &unpack_small_floats<4, false>;
    case QuantizedMode::mxfp8:
      return &unpack_small_floats<8, true>;
    case QuantizedMode::blocks:
      break;
  }
  switch (w.kind) {
#define MITTENS_UNPACK(kind) \
  case BlockKind::kind:      \
    return &unpack_blocks<BlockKind::kind>
    MITTENS_UNPACK(q4_0);
    MITTENS_UNPACK(q4_1);
    MITTENS_UNPACK(q5_0);
    MITTENS_UNPACK(q5_1);
    MITTENS_UNPACK(q8_0);
    MITTENS_UNPACK(q2_k);
    MITTENS_UNPACK(q3_k);
    MITTENS_UNPACK(q4_k);
    MITTENS_UNPACK(q5_k);
    MITTENS_UNPACK(q6_k);
    MITTENS_UNPACK(iq4_nl);
    MITTENS_UNPACK(iq4_xs);
    MITTENS_UNPACK(mxfp4);
    MITTENS_UNPACK(nvfp4);
#undef MITTENS_UNPACK
  }
  __builtin_unreachable();
}

}  // namespace

PackedRows packed_rows(const QuantizedWeights& w, Type type) {
  PackedRows rows{};
  rows.unpack = unpack_of(w);
  rows.rows = reinterpret_cast<const uint8_t*>(w.words);
  rows.type = type;
  rows.zero = 128;
  if (w.mode == QuantizedMode::blocks) {
    rows.row_stride = w.blocks * block_bytes(w.kind);
    rows.group_bits = block_group_bits(w.kind);
    rows.row_bytes = static_cast<double>(block_bytes(w.kind)) / static_cast<double>(block_weights(w.kind));
    return rows;
  }
  const bool affine = w.mode == QuantizedMode::affine;
  const size_t item = !affine ? 1 : type == Type::float32 ? 4 : 2;
  rows.scales = w.scales;
  rows.biases = w.biases;
  rows.row_stride = w.words_stride * sizeof(uint32_t);
  rows.scales_stride = w.scales_stride;
  rows.biases_stride = w.biases_stride;
  rows.group_bits = __builtin_ctz(static_cast<unsigned>(w.group_size));
  rows.row_bytes = w.bits / 8.0 + static_cast<double>((affine ? 2 : 1) * item) / w.group_size;
  if (w.bits == 8) {
    rows.zero = 0;
    rows.small_floats = !affine;
  }
  return rows;
}

}  // namespace mittens::cpu::MITTENS_ISA
