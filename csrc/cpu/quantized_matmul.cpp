#include "cpu/quantized_matmul.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(quantized_matmul)
MITTENS_VERSIONS(quantized_swiglu)

void quantized_matmul(Type type, const QuantizedWeights* w, const void* x, const void* bias, void* y, size_t matrices,
                      size_t rows, size_t columns, size_t outputs, bool exact) {
  quantized_matmul_versions[isa_index()](type, w, x, bias, y, matrices, rows, columns, outputs, exact);
}

void quantized_swiglu(Type type, const QuantizedWeights* gate, const QuantizedWeights* up, const void* x, void* y,
                      size_t matrices, size_t rows, size_t columns, size_t outputs, bool exact) {
  quantized_swiglu_versions[isa_index()](type, gate, up, x, y, matrices, rows, columns, outputs, exact);
}

}  // namespace mittens::cpu
