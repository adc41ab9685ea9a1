// Which kernel serves a product of few rows of x, how its work is shared out, and where mx is faster. All that depends
// on the GPU is here; the tables are in plan_*.cpp.
#pragma once

#include <cstdint>
#include <limits>

#include "backends/launch.h"
#include "cpu/matmul/gguf.h"
#include "ops/matmul/quantized_weights.h"
#include "runtime/array_layout.h"
#include "runtime/calibration.h"
#include "runtime/gpu.h"

namespace mittens {

// x [matrices, rows, columns] by w of [outputs, columns] or [columns, outputs] -> y [matrices, rows, outputs].
struct ProductSizes {
  uint32_t matrices;
  uint32_t rows;
  uint32_t columns;
  uint32_t outputs;
};

inline constexpr uint32_t most_matrices = 65535;  // of a grid's third dimension on NVIDIA GPUs
inline constexpr uint32_t unlimited_rows = std::numeric_limits<uint32_t>::max();
inline constexpr uint32_t unlimited_splits = std::numeric_limits<uint32_t>::max();

// The problem for calibration. format: of the weights, a number for each format that has kernels of its own.
Problem product_problem(const char* op, mx::Dtype dtype, uint32_t format, const ProductSizes& sizes);
uint32_t format_number(const QuantizedFormat& format);

// Threadgroups that share the columns of x: their sums lie beside each other in a workspace, for a second kernel.
struct Splits {
  uint32_t splits;
  uint32_t columns_per_split;
};

// Threadgroups whose simdgroups share the columns and have outputs of their own.
struct RowProductsPlan {
  uint32_t simdgroups;  // of a threadgroup, which share out the columns
  uint32_t outputs_per_group;
  uint32_t rows;  // of x that a threadgroup takes
};

// --- dense weights, [outputs, columns]

enum class GemvKernel { short_row, tiles, rows };

struct GemvPlan : RowProductsPlan, Splits {
  GemvKernel kernel;
  uint32_t chunk;  // columns that a simdgroup takes at once
  uint32_t loads;  // short_row: of a lane, which cover its row of weights
};

// The layout of the weights, known at the call only.
struct GemvWeights {
  bool packs = true;  // whether rows are made of whole 16 bytes
  bool short_strides = true;  // whether 32 bits count the elements between rows of weights
};

GemvPlan plan_gemv(const ProductSizes& sizes, mx::Dtype dtype, GemvWeights weights, uint32_t most_splits,
                   mx::Stream stream);

// A plan whose sums do not depend on sizes.rows, up to most_gemv_rows.
GemvPlan plan_gemv_exact(const ProductSizes& sizes, mx::Dtype dtype, uint32_t most_splits, mx::Stream stream);

// Why mx is faster; null where it is not known to be.
const char* why_mx_gemv(const ProductSizes& sizes, bool transpose, mx::Dtype dtype, mx::Stream stream);

// --- weights [columns, outputs]: lanes go along the outputs (metal/matmul/outputs.h)

struct ColumnsPlan : Splits {
  uint32_t rows;  // of x that a threadgroup takes
  uint32_t row_blocks;  // of `rows`
  uint32_t lanes;  // of a simdgroup along the outputs
  uint32_t tiles;  // threadgroups along the outputs
  uint32_t threads;  // of a threadgroup
};

// The numbers that tell the kernels apart.
struct ColumnsKernels {
  uint32_t owned;  // outputs of a lane
  uint32_t most_owned;  // by the kernel that owns the most: splits go by it, known before it is known which serves
  uint32_t most_rows;
};

ColumnsPlan plan_columns(const Problem& problem, const ProductSizes& sizes, const ColumnsKernels& kernels,
                         uint32_t most_splits, mx::Stream stream);

// Threadgroups that have many rows of x and many outputs (metal/matmul/apple/qmm_tiles.h).
struct TilesPlan {
  uint32_t rows;  // of x that a threadgroup takes
  uint32_t row_blocks;  // of `rows`
  uint32_t output_groups;
};

// Tiles that share the columns where they are too few to keep a GPU busy: only tiles of 32 rows of one matrix do.
struct SplitTilesPlan : TilesPlan, Splits {};

// The kernels that there are: outputs of a threadgroup with 32 rows of x, and with 64 (0: no such kernel).
struct TilesKernels {
  uint32_t outputs_32;
  uint32_t outputs_64;
};

// Kernels for quantized weights. matrices: of weights that pass by one simdgroup, 2 for gate and up.
TilesKernels quantized_tiles(const QuantizedFormat& format, uint32_t matrices);

TilesPlan plan_tiles(const TilesKernels& kernels, const ProductSizes& sizes);

void share_out(Launch& launch, const TilesPlan& plan, uint32_t matrices);

// Dense weights by tiles (metal/matmul/apple/matmul_tiles.metal): whether they serve these rows and the type on the
// stream's GPU.
bool has_dense_tiles(const ProductSizes& sizes, bool transpose, mx::Dtype dtype, mx::Stream stream);

TilesPlan plan_dense_tiles(const ProductSizes& sizes, bool transpose, mx::Dtype dtype);

// Products whose blocks are masked (metal/matmul/apple/block_masked_mm.metal, and block_masked_row.metal for one row of
// x).
struct MaskedPlan {
  bool by_tiles;
  uint32_t rows;  // tiles: of x that a threadgroup takes
  uint32_t outputs;  // and its outputs
  Size3 threadgroups;
  Size3 threads;
};

// transpose: whether w is [outputs, columns]. is_scaled: whether the masks of operands are numbers.
MaskedPlan plan_masked(const ProductSizes& sizes, bool transpose, int block_size, bool is_scaled, mx::Dtype dtype,
                       mx::Stream stream);

// Why no kernel serves; null where one does, or where none is launched.
const char* why_no_masked_kernel(const ProductSizes& sizes, mx::Dtype dtype, mx::Stream stream);

// Whether mx has them in every type.
bool mx_has_masked(mx::Stream stream);

// Quantized weights: on NVIDIA GPUs matmul/nvidia/columns.metal where it has the format, on Apple GPUs
// matmul/apple/qvm_tiles.metal for many rows, else matmul/qvm.metal.
enum class QvmKernel { columns, qvm, qvm_tiles };

struct QvmPlan : Splits {
  QvmKernel kernel;
  ColumnsPlan columns;  // columns
  uint32_t row_blocks;  // qvm: of 8 rows of x, as the next three
  uint32_t output_groups;  // of blocks
  uint32_t blocks;  // of 64 outputs, that a threadgroup has
  uint32_t sharers;  // simdgroups that share the rows of weights of a block
  TilesPlan by_tiles;  // qvm_tiles
};

QvmPlan plan_qvm(const Problem& problem, const QuantizedFormat& format, const ProductSizes& sizes, uint32_t most_splits,
                 mx::Stream stream);

// Simdgroups that have outputs of their own (metal/matmul/row_products.h).
struct RowsPlan {
  uint32_t rows;  // of x that a simdgroup takes
  uint32_t row_blocks;  // of `rows`
  uint32_t output_blocks;  // of the outputs that a simdgroup has
  uint32_t blocks;  // that a threadgroup has
  uint32_t sharers;  // simdgroups that share the columns of a block
};

// outputs: of a simdgroup. most_rows: of x that there is a kernel for.
RowsPlan plan_rows(const ProductSizes& sizes, uint32_t outputs, const Gpu& gpu, uint32_t most_rows = 4);

RowsPlan plan_rows(const ProductSizes& sizes, uint32_t outputs, mx::Stream stream);

// Whether one row times several matrices is one launch (metal/matmul/qmv_several.metal).
bool multiplies_several(mx::Stream stream);

// Whether two products of one row share a norm that lies between them (metal/matmul/normed_row.h).
bool shares_norm(mx::Stream stream);

// Whether a product looks like a model's head, the last reader of a norm.
constexpr bool is_head(int64_t outputs, int64_t columns) {
  return outputs >= 24000 && outputs > 6 * columns;
}

// A launch of a kernel on them, but for its arguments.
void share_out(Launch& launch, const RowsPlan& plan, uint32_t matrices);

// Simdgroups that have outputs and up to 8 rows of x of their own (metal/matmul/matrices.h).
struct MatricesPlan {
  uint32_t output_blocks;  // of the outputs that a simdgroup has
  uint32_t row_groups;  // of row_blocks
  uint32_t row_blocks;  // of 8 rows of x, that a threadgroup has
  uint32_t sharers;  // simdgroups that share the columns of a block
};

// outputs: of a simdgroup.
MatricesPlan plan_matrices(const ProductSizes& sizes, uint32_t outputs, const Gpu& gpu);

void share_out(Launch& launch, const MatricesPlan& plan, uint32_t matrices);

// --- quantized weights, [outputs, columns]

// mma_row, tiles and rows are NVIDIA's.
enum class QuantizedKernel { mma_row, tiles, rows, qmm_tiles, qmm, qmv };

// Kernels of an op. matrices: of weights that pass by one simdgroup, 2 for gate and up.
struct QuantizedKernels {
  const char* op;
  uint32_t matrices;
  uint32_t most_rows;  // of x in a threadgroup of the kernel by rows for NVIDIA GPUs
  bool has_tiles;  // on NVIDIA GPUs
  bool has_qmm_tiles = false;
};

// Rows of x for each matrix that kernels for a GPU are worth their time for: more are left to mx there.
uint32_t most_quantized_rows(const QuantizedKernels& kernels, mx::Stream stream);

struct QuantizedPlan : RowProductsPlan {
  QuantizedKernel kernel;
  uint32_t run;  // tiles: columns that have one scale
  RowsPlan shared;  // qmv
  MatricesPlan by_matrices;  // qmm
  SplitTilesPlan by_tiles;  // qmm_tiles
};

QuantizedPlan plan_quantized(const QuantizedKernels& kernels, const QuantizedFormat& format, mx::Dtype dtype,
                             const ProductSizes& sizes, mx::Stream stream);

// Whether a GPU sums each row of x as it sums a row alone, where exact products are asked for.
constexpr bool are_few_exact(size_t rows) {
  return rows <= most_gemv_rows;
}

// Whether plan_quantized_exact serves, so that rows asked to be exact share a launch.
bool is_exact_by_plan(size_t rows, mx::Stream stream);

// Whether mx computes a product that a kernel covers as well. It gets no exact rows on a GPU, if they are few: its sums
// depend on how many there are.
// problem: of product_problem.
bool prefer_mx_product(const Problem& problem, const char* reason, mx::Stream stream, const char* called = nullptr);

// Whether gate and up of exact rows are one launch: elsewhere each row would read the weights.
bool gates_exact_rows(mx::Stream stream);

// A plan whose sums do not depend on sizes.rows, up to most_gemv_rows of one matrix.
QuantizedPlan plan_quantized_exact(const QuantizedKernels& kernels, const QuantizedFormat& format, mx::Dtype dtype,
                                   const ProductSizes& sizes, mx::Stream stream);

// Whether products whose x may be rounded to integers of 8 bits are multiplied as such, on matrix units
// (metal/matmul/apple/m5/qmm_int8.metal).
bool multiplies_int8(const QuantizedFormat& format, const ProductSizes& sizes, mx::Stream stream);

// Throws where kernels run on a GPU that does not multiply integers of 8 bits.
void check_int8_activations(const char* op, mx::Stream stream);

// Why mx is faster; null where it is not known to be.
const char* why_mx_quantized(const QuantizedKernels& kernels, const QuantizedFormat& format, mx::Dtype dtype,
                             const ProductSizes& sizes, mx::Stream stream);

// --- weights of GGUF files, [outputs, columns]

struct GgufPlan {
  bool is_by_tiles;
  RowsPlan rows;  // not by tiles
  TilesPlan tiles;
};

// exact: a plan whose sums do not depend on sizes.rows; problem: of one row then.
GgufPlan plan_gguf(const Problem& problem, cpu::BlockKind kind, const ProductSizes& sizes, bool exact,
                   mx::Stream stream);

// The most rows of x that kernels take; mx computes more.
uint32_t most_gguf_rows(mx::Stream stream);

// Why mx is faster with dequantized weights; null where it is not known to be.
const char* why_mx_gguf(cpu::BlockKind kind, mx::Dtype dtype, const ProductSizes& sizes, mx::Stream stream);

}  // namespace mittens
