// GGUF blocks on the CPU. q4_0, q5_0 and q8_0: 32 weights w = d * (q - zero) as a half d, then their integers; q4_1 and
// q5_1: w = d * q + m with a half m after d. Of 4 bits byte i has integer i below and i + 16 above; fifth bits stand
// before. q2_k to q6_k: 256 weights in groups of 16 or 32, whose scales, and minima but in q3_k and q6_k, are integers
// times a half of the block. iq4_nl and iq4_xs: as q4_0 and q4_k without minima, with 16 values in the place of
// integers. mxfp4: a byte of exponent, then integers as of q4_0 that stand for floats; nvfp4: 64 weights, four scales
// of 8 bits, then the same 16 at a time.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

enum class BlockKind { q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4, nvfp4 };

constexpr size_t block_weights(BlockKind kind) {
  constexpr size_t weights[] = {32, 32, 32, 32, 32, 256, 256, 256, 256, 256, 32, 256, 32, 64};
  return weights[static_cast<size_t>(kind)];
}

constexpr size_t block_bytes(BlockKind kind) {
  constexpr size_t bytes[] = {18, 20, 22, 24, 34, 84, 110, 144, 176, 210, 18, 136, 17, 36};
  return bytes[static_cast<size_t>(kind)];
}

// Whether there is a quantizer, the package's.
constexpr bool is_quantizable(BlockKind kind) {
  return kind <= BlockKind::q8_0 || kind == BlockKind::mxfp4;
}

// y[m, n] = round(sum_k x[m, k] * w[n, k] + bias[n]), sums in float32.
void block_matmul(Type type, BlockKind kind,
                  const uint8_t* blocks,  // [outputs, columns / block_weights, block_bytes]
                  const void* x,  // [rows, columns]
                  const void* bias,  // [outputs] or nullptr
                  void* y,  // [rows, outputs]
                  size_t rows, size_t columns, size_t outputs,
                  bool exact);  // up to most_exact_rows, each bit for bit as alone

// y = round(w), computed in float32.
void block_dequantize(Type type, BlockKind kind, const uint8_t* blocks, void* y, size_t count);

// Byte for byte the result of the gguf package's quantizer for the weights widened to float32.
void block_quantize(Type type, BlockKind kind, const void* w, uint8_t* blocks, size_t count);

}  // namespace mittens::cpu
