#include "cpu/gguf.h"

#include "cpu/dispatch.h"

namespace mittens::cpu {

MITTENS_VERSIONS(block_dequantize)
MITTENS_VERSIONS(block_quantize)

void block_dequantize(Type type, BlockKind kind, const uint8_t* blocks, void* y, size_t count) {
  block_dequantize_versions[isa_index()](type, kind, blocks, y, count);
}

void block_quantize(Type type, BlockKind kind, const void* w, uint8_t* blocks, size_t count) {
  block_quantize_versions[isa_index()](type, kind, w, blocks, count);
}

}  // namespace mittens::cpu
