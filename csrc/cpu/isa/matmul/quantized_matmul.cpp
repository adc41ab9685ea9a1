#include "cpu/matmul/quantized_matmul.h"

#include "cpu/isa/matmul/quantized_products.h"

namespace mittens::cpu::MITTENS_ISA {

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
