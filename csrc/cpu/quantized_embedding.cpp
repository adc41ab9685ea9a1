#include "cpu/quantized_embedding.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(quantized_embedding)

void quantized_embedding(Type type, const QuantizedWeights& w, const uint32_t* indices, bool is_signed, size_t count,
                         size_t rows, size_t columns, void* y) {
  quantized_embedding_versions[isa_index()](type, w, indices, is_signed, count, rows, columns, y);
}

}  // namespace mittens::cpu
