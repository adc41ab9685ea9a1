// Products with quantized weights on the CPU, in the formats of mx.quantize; sums in float32.
#pragma once

#include "cpu/matmul/gguf.h"

namespace mittens::cpu {

// affine: w = scale * q + bias, q unsigned integers, scales and biases of the type of x. mxfp4, mxfp8: w = scale * q, q
// floats of 4 or 8 bits (E2M1, E4M3), scales powers of two in a byte (E8M0). nvfp4: as mxfp4 with scales as E4M3.
// blocks: of GGUF, which block_matmul takes.
enum class QuantizedMode { affine, mxfp4, mxfp8, nvfp4, blocks };

// One matrix. q are packed in words from the lowest bit up. Strides are from row to row, in elements of the array; rows
// lie in memory as they are.
struct QuantizedWeights {
  const uint32_t* words;  // [outputs, columns * bits / 32]; not transposed [columns, outputs * bits / 32]; or blocks
  const void* scales;  // [outputs, columns / group_size]; not transposed [columns, outputs / group_size]
  const void* biases;  // as scales; affine alone
  size_t words_stride;
  size_t scales_stride;
  size_t biases_stride;
  QuantizedMode mode;
  int bits;  // affine: 2, 3, 4, 5, 6 or 8
  int group_size;  // affine: 32, 64 or 128; nvfp4: 16
  bool transpose;  // the groups go along the columns of x
  BlockKind kind = {};  // of blocks, which have none of the other members but words, mode and transpose
  size_t blocks = 0;  // of a row
};

inline QuantizedWeights weights_of_blocks(BlockKind kind, const uint8_t* data, size_t blocks_of_row) {
  QuantizedWeights w{};
  w.words = reinterpret_cast<const uint32_t*>(data);
  w.mode = QuantizedMode::blocks;
  w.transpose = true;
  w.kind = kind;
  w.blocks = blocks_of_row;
  return w;
}

// The most rows of x whose results can have the bits of calls of one row.
constexpr size_t most_exact_rows = 32;

// How a product sums.
struct ProductMode {
  bool exact;  // up to most_exact_rows, each bit for bit as alone; transposed weights only
  bool int8;  // x may be rounded to integers of 8 bits, where that is faster
};

// y[i, m, n] = round(sum_k x[i, m, k] * w[i][n, k] + bias[n]) for each matrix i; not transposed w[i][k, n].
void quantized_matmul(Type type,  // of scales, biases, x, bias and y
                      const QuantizedWeights* w,  // [matrices]
                      const void* x,  // [matrices, rows, columns]
                      const void* bias,  // [outputs] or nullptr
                      void* y,  // [matrices, rows, outputs]
                      size_t matrices, size_t rows, size_t columns, size_t outputs, ProductMode mode);

// v * sigmoid(v * (alpha + beta * v^2)).
struct Activation {
  float alpha;
  float beta;
};

// y[i] = round(activation(x[i] @ gate[i].T) * (x[i] @ up[i].T)) for each pair of matrices i, all in float32 and rounded
// once.
void quantized_swiglu(Type type, Activation activation,
                      const QuantizedWeights* gate,  // [matrices], transposed
                      const QuantizedWeights* up,  // [matrices], transposed
                      const void* x,  // [matrices, rows, columns]
                      void* y,  // [matrices, rows, outputs]
                      size_t matrices, size_t rows, size_t columns, size_t outputs, ProductMode mode);

}  // namespace mittens::cpu
