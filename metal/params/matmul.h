// Parameters of the products. Compiled by C++ and by Metal.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mittens {

enum { kShortSimdgroups = 8 };  // of a threadgroup of gemv_short, each with an output of its own

// Outputs of a simdgroup of matmul/gemv.metal, by the rows of x.
constexpr int gemv_outputs(int rows) {
  return rows > 8 ? 2 : 4;
}

// Rows of x that a lane of gemv_columns has sums for, at most: sums of 16 rows and a pack would fill its registers.
enum { kGemvColumnsRows = 8 };

// Runs of weights that a simdgroup of matmul/gemv_tiles.metal takes at once of each row, by rows of x and outputs of a
// threadgroup.
enum { kGemvRunBytes = 128 };
constexpr int gemv_runs(int rows, int outputs) {
  return rows == 8 && outputs == 16 ? 2 : 1;
}

struct GemvParams {
  uint32_t rows;               // of x
  uint32_t columns;            // of x
  uint32_t outputs;            // columns of y
  uint32_t weight_stride;      // elements from row to row of w
  uint32_t splits;             // threadgroups that share the columns of x
  uint32_t columns_per_split;  // that each of them takes
  uint32_t rounds;             // tiles kernel: times that a threadgroup's simdgroups take columns
  uint32_t round_mask;         // of a threadgroup's number: which of these it begins with
  uint32_t sharers;            // rows kernel: simdgroups that share the columns of a few rows of w
  uint32_t lanes;              // columns kernel: lanes of a simdgroup along the outputs, 1 to 32
  uint32_t has_bias;
};

struct GemvShortParams {
  uint32_t columns;
  uint32_t outputs;
  uint32_t weight_stride;
  uint32_t has_bias;
};

struct SplitSumParams {
  uint32_t splits;
  uint32_t rows;
  uint32_t outputs;
  uint32_t has_bias;
};

// The axes of a stack of matrices, merged where strides allow.
struct BatchParams {
  uint32_t axes;      // 0 where there is one matrix, at most 4
  uint32_t shape[4];  // 1 from `axes` on
};

// Strides are in elements of their array.
struct QuantizedParams {
  BatchParams batch;
  int64_t weight_strides[4];  // of the batch axes
  int64_t scales_strides[4];
  int64_t biases_strides[4];
  uint32_t matrices;
  uint32_t rows;           // of x, for each matrix
  uint32_t columns;        // of x
  uint32_t outputs;        // columns of y
  uint32_t group_shift;    // a group is 1 << group_shift integers
  uint32_t weight_stride;  // from row to row
  uint32_t scales_stride;
  uint32_t biases_stride;
  uint32_t has_bias;
  uint32_t two23;              // 2^23 as a float's bits (mittens/integers.h)
  uint32_t outputs_per_group;  // that a threadgroup computes; of the rows kernel
  uint32_t lanes;              // of a simdgroup along the outputs, a power of two; from here on of the columns kernel
  uint32_t splits;             // threadgroups that share the columns of x
  uint32_t columns_per_split;  // that each of them takes
  float gate_alpha;            // of the activation of gated ones (matmul/activation.h)
  float gate_beta;
};

enum {
  kInt8RowThreads = 128,  // of a threadgroup of matmul/apple/m5/int8_rows.metal, each with 8 columns
  kInt8Tile = 64,         // rows, and outputs, of a threadgroup of matmul/apple/m5/qmm_int8.metal
};

// Products of integers. Strides are in elements of their array, from row to row.
struct Int8Params {
  uint32_t rows;
  uint32_t padded_rows;  // whole tiles of them
  uint32_t columns;
  uint32_t outputs;
  uint32_t weight_stride;
  uint32_t scales_stride;
  uint32_t biases_stride;
  uint32_t has_bias;
};

enum { kEmbeddingThreads = 128 };  // of a threadgroup of matmul/quantized_embedding.metal

struct EmbeddingParams {
  uint32_t count;  // of indices
  uint32_t rows;   // of the matrix
  uint32_t columns;
  uint32_t group_shift;   // a group is 1 << group_shift columns
  uint32_t words_stride;  // from row to row
  uint32_t scales_stride;
  uint32_t biases_stride;
  uint32_t is_signed;  // whether indices are int32, which count from the end below zero
};

// A norm of x in the product that reads it (matmul/normed_row.h).
struct NormParams {
  float eps;
  uint32_t blocks;  // that have a sum of squares
};

struct NormedSwigluParams {
  QuantizedParams weights;
  NormParams norm;
};

enum { kMostTogether = 4 };  // matrices of matmul/qmv_several.metal

struct QuantizedMatmulsParams {
  QuantizedParams weights;  // shared by all matrices: columns, rows' strides, has_bias, the format
  NormParams norm;
  uint32_t count;                        // of matrices
  uint32_t first_block[kMostTogether];   // of each, by blocks of kRowOutputs outputs, or of 1 where it has fewer
  uint32_t first_output[kMostTogether];  // of each, in y
  uint32_t outputs[kMostTogether];       // of each
};

// The room of kernels of products in threadgroup memory, and the steps of kernels of one row (matmul/nvidia/mma_row.h).
// Enumerators: Metal takes no variable outside of a function that is not in constant memory.
enum {
  kProductSimdgroups = 8,   // of a threadgroup, which share out the columns
  kRowSimdgroups = 16,      // the same in matmul/nvidia/mma_row.metal and matmul/nvidia/quantized_swiglu_mma.metal
  kProductPartials = 1024,  // floats that they leave for the last step (matmul/nvidia/products.h)
  kRowBlocks = 2,           // of 8 products of a simdgroup: as a tensor core's left matrix
  kRowStep = 512,           // columns of a simdgroup
};

enum {
  kOutputSimdgroups = 8,  // of a threadgroup whose lanes go along the outputs (matmul/outputs.h)
};

// Words of affine weights that a lane takes at once, by the rows of x (matmul/nvidia/rows.metal and
// matmul/nvidia/quantized_swiglu.metal).
constexpr int lane_words(int bits, int rows) {
  return bits == 4 ? (rows == 1 ? 4 : rows <= 4 ? 2 : 1) : (rows <= 4 ? 4 : 2);
}

// Products by rows (matmul/row_products.h).
enum {
  kRowOutputs = 4,     // of a simdgroup, or half as many of each of two matrices
  kRunColumns = 16,    // that a lane takes at once: a sum's order does not depend on how many rows of x there are
  kMostExactRows = 8,  // of x that kernels take at once
};

// Outputs of a simdgroup, by the rows of x and the bytes of its type: as many as registers have room for.
constexpr int row_outputs(int rows, int bytes) {
  return rows > 4 && bytes == 4 ? kRowOutputs / 2 : kRowOutputs;
}

// Of a simdgroup in products of several rows by matrices (matmul/matrices.h).
enum {
  kMatrixOutputs = 32,
  kMatrixRows = 8,   // of x
  kMatrixStep = 64,  // columns that it takes at once
};

// Of a threadgroup in products of many rows (matmul/apple/qmm_tiles.h).
enum {
  kTileSimdgroups = 4,
  kTileOutputs = 64,
  kTileBand = 8,  // blocks of rows that follow one another in the grid
};

// Of a simdgroup where weights are [columns, outputs] (matmul/qvm.metal).
enum {
  kTransposedOutputs = 64,
  kTransposedStep = 32,  // rows of weights that it takes at once
};

enum { kOwnedOutputs = 8 };  // of a lane of matmul/nvidia/columns.metal

// Outputs of a threadgroup of matmul/nvidia/tiles.metal, and runs of weights that have one scale that its simdgroups take
// at once of each, by the rows of x.
constexpr int affine_tile_outputs(int bits) {
  return bits == 4 ? 32 : 16;
}
constexpr int affine_tile_runs(int bits, int rows) {
  return bits == 4 && rows == 8 ? 4 : 2;
}

// Where a mask of blocks lies, in its elements; strides are 0 where it is one for all blocks.
struct BlockMaskParams {
  uint32_t matrix_stride;
  uint32_t across_stride;   // from one block of rows of x, or of outputs, to the next
  uint32_t columns_stride;  // from one block of columns of x to the next; of the mask of y, of outputs
};

enum { kMaskedLanes = 8 };  // of a simdgroup along the outputs, of one row by w [columns, outputs]

// Products whose operands and results are masked by blocks (matmul/apple/block_masked_mm.metal).
struct BlockMaskedParams {
  enum { has_bias = 0 };
  uint32_t matrices;
  uint32_t rows;            // of x, for each matrix
  uint32_t columns;         // of x
  uint32_t outputs;         // columns of y
  uint32_t weight_stride;   // elements from row to row of w
  uint32_t block_shift;     // a block is 1 << block_shift rows and columns
  uint32_t has_bools_of_y;  // whether the mask of y is of bools, not of its type
  uint32_t has_one_x;       // whether all matrices of w have the same x
  uint32_t has_one_w;       // whether all of x have the same w
  int64_t matrix_elements;  // from one matrix of w to the next
  BlockMaskParams of_x;
  BlockMaskParams of_w;
  BlockMaskParams of_y;
};

struct BlocksParams {
  uint32_t rows;       // of x
  uint32_t columns;    // of x
  uint32_t outputs;    // columns of y
  uint32_t row_bytes;  // of blocks
  uint32_t has_bias;
};

struct BlockCountParams {
  uint32_t count;  // of blocks
};

enum { kDequantizedColumns = 16 };  // of a thread

struct DequantizeParams {
  uint32_t kind;  // BlockKind
  uint32_t runs;  // of kDequantizedColumns weights
};

}  // namespace mittens
