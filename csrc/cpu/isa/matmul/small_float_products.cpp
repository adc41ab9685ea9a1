// Instantiates templates of quantized_products.h, apart so that they are compiled side by side.
#include "cpu/isa/matmul/quantized_products.h"

#if !defined(MITTENS_UNPACKS_ALL)
namespace mittens::cpu::MITTENS_ISA {

template void multiply<SmallFloats<4>>(const QuantizedWeights*, const QuantizedWeights*, const ProductCall&);
template void multiply<SmallFloats<8>>(const QuantizedWeights*, const QuantizedWeights*, const ProductCall&);

}  // namespace mittens::cpu::MITTENS_ISA
#endif
