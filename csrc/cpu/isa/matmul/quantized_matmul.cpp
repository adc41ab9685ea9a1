#include "cpu/quantized_matmul.h"

#include "cpu/isa/matmul/quantized_products.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

template <typename T, int bits>
Unpack unpack_of_group(int group_size) {
  return group_size == 32   ? &unpack_affine<T, bits, 32>
         : group_size == 64 ? &unpack_affine<T, bits, 64>
                            : &unpack_affine<T, bits, 128>;
}

template <typename T>
Unpack unpack_of(const QuantizedWeights& w) {
#if defined(MITTENS_UNPACKS_ALL)
  if (w.mode == QuantizedMode::nvfp4) {
    return &unpack_small_floats<4, false>;
  } else if (w.mode != QuantizedMode::affine) {
    return w.bits == 4 ? &unpack_small_floats<4, true> : &unpack_small_floats<8, true>;
  } else if (w.bits == 4 || w.bits == 8) {
    return w.bits == 4 ? unpack_of_group<T, 4>(w.group_size) : unpack_of_group<T, 8>(w.group_size);
  }
#endif
  return w.bits == 2   ? unpack_of_group<T, 2>(w.group_size)
         : w.bits == 3 ? unpack_of_group<T, 3>(w.group_size)
         : w.bits == 5 ? unpack_of_group<T, 5>(w.group_size)
                       : unpack_of_group<T, 6>(w.group_size);
}

}  // namespace

template <>
Unpacked source_from<Unpacked>(const QuantizedWeights& w, Type type) {
  const bool affine = w.mode == QuantizedMode::affine;
  const size_t item = !affine ? 1 : type == Type::float32 ? 4 : 2;
  Unpacked source{};
  with_type(type, [&](auto t) { source.unpack = unpack_of<decltype(t)>(w); });
  source.rows = reinterpret_cast<const uint8_t*>(w.words);
  source.scales = static_cast<const char*>(w.scales);
  source.biases = static_cast<const char*>(w.biases);
  source.row_stride = w.words_stride * sizeof(uint32_t);
  source.scales_stride = w.scales_stride * item;
  source.biases_stride = affine ? w.biases_stride * item : 0;
  source.row_bytes = w.bits / 8.0 + static_cast<double>((affine ? 2 : 1) * item) / w.group_size;
  return source;
}

namespace {

void multiply_by_format(const QuantizedWeights* w, const QuantizedWeights* up, const ProductCall& call) {
#if !defined(MITTENS_UNPACKS_ALL)
  if (w->mode != QuantizedMode::affine) {
    return w->bits == 4 ? multiply<SmallFloats<4>>(w, up, call) : multiply<SmallFloats<8>>(w, up, call);
  }
  if (w->bits == 4 || w->bits == 8) {
    return w->bits == 4 ? multiply<Affine<4>>(w, up, call) : multiply<Affine<8>>(w, up, call);
  }
#endif
  multiply<Unpacked>(w, up, call);
}

}  // namespace

void quantized_matmul(Type type, const QuantizedWeights* w, const void* x, const void* bias, void* y, size_t matrices,
                      size_t rows, size_t columns, size_t outputs, ProductMode mode) {
  multiply_by_format(w, nullptr, {type, nullptr, x, bias, y, matrices, rows, columns, outputs, mode.exact});
}

void quantized_swiglu(Type type, Activation activation, const QuantizedWeights* gate, const QuantizedWeights* up,
                      const void* x, void* y, size_t matrices, size_t rows, size_t columns, size_t outputs,
                      ProductMode mode) {
  multiply_by_format(gate, up, {type, &activation, x, nullptr, y, matrices, rows, columns, outputs, mode.exact});
}

}  // namespace mittens::cpu::MITTENS_ISA
