// How the products with chosen experts are shared out, and where mx is faster. All that depends on the GPU is here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/launch.h"
#include "mlx/stream.h"
#include "cpu/matmul/quantized_matmul.h"
#include "ops/matmul/plan.h"
#include "params/matmul.h"
#include "runtime/numerics.h"

namespace mittens {

struct ExpertSizes {
  size_t rows;  // of results
  size_t experts;
  size_t columns;
  size_t outputs;
};

// The problem for calibration. format: of the weights, a number for each format that has kernels of its own. sorted:
// whether the caller has sorted rows by their experts, for which mx has kernels of its own.
Problem experts_problem(const char* op, mx::Dtype dtype, uint32_t format, bool sorted, const ExpertSizes& sizes);

inline ExpertSizes sizes_of(const Problem& problem) {
  const auto& [rows, experts, columns, outputs] = problem.sizes;
  return {rows, experts, columns, outputs};
}

// Below, `matrices` counts the matrices of an expert that a simdgroup multiplies: 1, or 2 for gate and up; 0 if no
// kernel takes tiles.

// Whether each row is to be computed as if it were alone.
bool are_exact(const ExpertSizes& sizes);

// Whether kernels take tiles of rows that have the same expert (metal/moe/apple).
bool takes_expert_tiles(const ExpertSizes& sizes, uint32_t matrices, mx::Stream stream);

// Why mx is faster; null where it is not known to be.
const char* why_mx_experts(const ExpertSizes& sizes, uint32_t matrices, mx::Stream stream);

// Whether mx is to compute such a problem.
bool prefer_mx_experts(const Problem& problem, uint32_t matrices, mx::Stream stream);

// Why a GPU has no kernel for `pairs` of `rows` each, or null.
const char* why_not_launched(size_t pairs, size_t rows, mx::Stream stream);

inline ProductSizes sizes_of(const QuantizedParams& params) {
  return {params.matrices, params.rows, params.columns, params.outputs};
}

// Whether the patch's tokens choose their experts in the launch of these. On NVIDIA GPUs the launches of a router, its
// experts and their sum were measured, and stay.
bool chooses_in_experts(mx::Stream stream);

// Whether kernels choose by groups, by scores in float32, by the square root of a softplus, and with any eps. NVIDIA's
// are the measured ones, which do not.
bool has_all_routes(mx::Stream stream);

// How native products sum, by their rows of results, in a call with these numerics.
cpu::ProductMode native_mode(const Numerics& numerics, size_t rows);

// Whether pairs of the same expert are one product.
bool shares_experts(const QuantizedFormat& format, uint32_t matrices, size_t pairs, size_t experts);

// Tiles of rows that have the same expert.
struct ExpertTilesPlan {
  uint32_t tile_rows;
  uint32_t tiles;  // at most, and as many as the grid has
};

// Rows of a tile by quantized and by dense experts.
uint32_t expert_tile_rows(const QuantizedFormat& format);
inline constexpr uint32_t dense_expert_tile_rows = 64;

ExpertTilesPlan plan_expert_tiles(uint32_t tile_rows, const ExpertSizes& sizes);

// Whether there are tiles for dense experts of that many columns and outputs.
bool has_dense_expert_tiles(size_t columns, size_t outputs, mx::Dtype dtype);

// The grid of a kernel that takes them.
void share_out_tiles(Launch& launch, const ExpertTilesPlan& plan, uint32_t outputs, uint32_t matrices);

// The functions that follow give a launch its grid, one place for each of sizes.matrices: a pair or a sum of pairs.

// Quantized experts; a simdgroup has `outputs` of one.
void share_out_pairs(Launch& launch, const ProductSizes& sizes, uint32_t outputs, mx::Stream stream);

// The same where each threadgroup finds its expert by itself: as few as there can be.
void share_out_chosen(Launch& launch, const ProductSizes& sizes, uint32_t outputs, mx::Stream stream);

// The same summed over the chosen experts, each with a simdgroup of the threadgroup.
void share_out_sums(Launch& launch, const ProductSizes& sizes, uint32_t outputs, uint32_t chosen, mx::Stream stream);

// Dense experts.
void share_out_dense(Launch& launch, const ProductSizes& sizes);

}  // namespace mittens
