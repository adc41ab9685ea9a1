// Products with quantized weights of one format. Each is compiled in one file (affine_products.cpp,
// small_float_products.cpp, quantized_matmul.cpp), so that no file takes long.
#pragma once

#include "cpu/isa/matmul/column_products.h"
#include "cpu/isa/matmul/unpacked.h"

namespace mittens::cpu::MITTENS_ISA {

// up: of pairs of products.
template <typename Source>
void multiply(const QuantizedWeights* w, const QuantizedWeights* up, const ProductCall& call) {
  auto source_of = [&](size_t i, size_t j = 0) { return Source((j == 0 ? w : up)[i], call.type); };
  if (w->transpose) {
    row_products<Source>(source_of, call);
  } else {
    column_products<Source>(source_of, call);
  }
}

#if !defined(MITTENS_UNPACKS_ALL)
extern template void multiply<Affine<4>>(const QuantizedWeights*, const QuantizedWeights*, const ProductCall&);
extern template void multiply<Affine<8>>(const QuantizedWeights*, const QuantizedWeights*, const ProductCall&);
extern template void multiply<SmallFloats<4>>(const QuantizedWeights*, const QuantizedWeights*, const ProductCall&);
extern template void multiply<SmallFloats<8>>(const QuantizedWeights*, const QuantizedWeights*, const ProductCall&);
#endif

}  // namespace mittens::cpu::MITTENS_ISA
