// How the products with chosen experts are shared out, and where mx is faster. All that depends on the GPU is here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/launch.h"
#include "mlx/stream.h"
#include "ops/matmul/plan.h"
#include "params/matmul.h"

namespace mittens {

struct ExpertSizes {
  size_t rows;  // of results
  size_t experts;
  size_t columns;
  size_t outputs;
};

// What a product with chosen experts is for calibration. format: of the weights, one number for each that has kernels
// of its own. sorted: whether the caller has sorted rows by their experts, for which mx has kernels of its own.
Problem experts_problem(const char* op, mx::Dtype dtype, uint32_t format, bool sorted, const ExpertSizes& sizes);

// Why mx is faster; null where it is not known to be.
const char* why_mx_experts(size_t rows, mx::Stream stream);

// Whether mx is to compute such a problem.
bool prefer_mx_experts(const Problem& problem, mx::Stream stream);

// Why a GPU has no kernel for so many pairs, each of so many rows, or null.
const char* why_not_launched(size_t pairs, size_t rows, mx::Stream stream);

inline ProductSizes sizes_of(const QuantizedParams& params) {
  return {params.matrices, params.rows, params.columns, params.outputs};
}

// Whether pairs of the same expert are one product. matrices: of an expert that pass by, 2 for gate and up.
bool shares_experts(const AffineFormat& format, uint32_t matrices, size_t pairs, size_t experts);

// The functions that follow give a launch its grid, one place for each of sizes.matrices: a pair or a sum of pairs.

// Quantized experts, of which a simdgroup has so many outputs.
void share_out_pairs(Launch& launch, const ProductSizes& sizes, uint32_t outputs, mx::Stream stream);

// The same summed over the chosen ones, for each of which a threadgroup has a simdgroup.
void share_out_sums(Launch& launch, const ProductSizes& sizes, uint32_t outputs, uint32_t chosen, mx::Stream stream);

// Dense experts.
void share_out_dense(Launch& launch, const ProductSizes& sizes);

}  // namespace mittens
