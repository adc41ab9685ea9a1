// Rows of weights of 8 bits or fewer, in any format: their integers as bytes, with a scale and an offset for each
// group.
#pragma once

#include "cpu/matmul/quantized_matmul.h"

namespace mittens::cpu {

struct PackedRows {
  // Columns [begin, begin + size) of row n, in whole groups and blocks: a byte for each, and the scales and offsets of
  // their groups. Weights are scale * (byte - zero) + offset; formats without offsets have -0, which changes no sum.
  using Unpack = void (*)(const PackedRows& from, size_t n, size_t begin, size_t size, uint8_t* bytes, float* scales,
                          float* offsets);
  Unpack unpack;
  const uint8_t* rows;
  const void* scales;
  const void* biases;
  size_t row_stride;  // bytes
  size_t scales_stride;  // elements, as the next
  size_t biases_stride;
  Type type;  // of scales and biases; affine alone
  int group_bits;  // log2 of the group's size
  double row_bytes;  // of a column
  float zero;  // 128 wherever integers multiply bytes
  bool small_floats;  // bytes are E4M3 and not integers
};

PackedRows packed_rows(const QuantizedWeights& w, Type type);

}  // namespace mittens::cpu
