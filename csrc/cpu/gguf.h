// GGUF blocks on the CPU: 32 weights w = d * (q - zero) as a half d, then their integers. q4_0: 16 bytes, byte i with
// integer i below and i + 16 above, zero 8. q8_0: 32 signed bytes.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

enum class BlockKind { q4_0, q8_0 };

constexpr size_t block_weights = 32;

constexpr size_t block_bytes(BlockKind kind) {
  return kind == BlockKind::q4_0 ? 18 : 34;
}

// y[m, n] = round(sum_k x[m, k] * w[n, k] + bias[n]), sums in float32.
void block_matmul(Type type, BlockKind kind,
                  const uint8_t* blocks,  // [outputs, columns / 32, block_bytes]
                  const void* x,  // [rows, columns]
                  const void* bias,  // [outputs] or nullptr
                  void* y,  // [rows, outputs]
                  size_t rows, size_t columns, size_t outputs);

// y = round(d * (q - zero)), the product in float32.
void block_dequantize(Type type, BlockKind kind, const uint8_t* blocks, void* y, size_t count);

// Byte for byte what the gguf package's quantizer makes of the weights widened to float32.
void block_quantize(Type type, BlockKind kind, const void* w, uint8_t* blocks, size_t count);

}  // namespace mittens::cpu
