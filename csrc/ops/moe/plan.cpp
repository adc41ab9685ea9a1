#include "ops/moe/plan.h"

#include <algorithm>

#include "params/moe.h"
#include "runtime/array_layout.h"

namespace mittens {

namespace {

// Rows of results from which on mlx-lm sorts them by their experts, and mx multiplies matrices.
constexpr size_t most_single_rows = 64;

// Most rows of results that are summed as a row alone, where exact products are asked for: 16 tokens by 16 experts. On
// a CPU an expert has at most cpu::most_exact_rows of them.
constexpr size_t most_exact_rows = 256;

// Elements of x that kernels count in 32 bits.
constexpr size_t most_elements = size_t(1) << 32;

void give_grid(Launch& launch, const ProductSizes& sizes, uint32_t output_groups) {
  launch.threadgroups = {output_groups, sizes.rows, sizes.matrices};
}

RowsPlan plan_places(const ProductSizes& sizes, uint32_t outputs, mx::Stream stream) {
  const uint32_t matrices = is_exact() ? 1 : sizes.matrices * sizes.rows;
  return plan_rows({matrices, 1, sizes.columns, sizes.outputs}, outputs, stream);
}

}  // namespace

Problem experts_problem(const char* op, mx::Dtype dtype, uint32_t format, bool sorted, const ExpertSizes& sizes) {
  return {op,
          dtype,
          format * 2 + sorted,
          {problem_size(sizes.rows), problem_size(sizes.experts), problem_size(sizes.columns),
           problem_size(sizes.outputs)}};
}

bool are_exact(const ExpertSizes& sizes) {
  return is_exact() && sizes.rows <= most_exact_rows;
}

bool prefer_mx_experts(const Problem& problem, uint32_t matrices, mx::Stream stream) {
  return prefer_mx(problem, why_mx_experts(sizes_of(problem), matrices, stream), stream);
}

bool takes_expert_tiles(const ExpertSizes& sizes, uint32_t matrices, mx::Stream stream) {
  return matrices > 0 && runs_apple_kernels(stream) && sizes.rows > most_single_rows && !are_exact(sizes) &&
         sizes.experts > 0 && sizes.experts < kTiledExperts &&
         sizes.rows < most_elements / std::max<size_t>(sizes.columns, 1) &&
         sizes.outputs >= kTileOutputs / kTileSimdgroups / matrices;
}

const char* why_not_launched(size_t pairs, size_t rows, mx::Stream stream) {
  const bool many = std::max(pairs, rows) > most_matrices;
  return stream.device == mx::Device::gpu && many ? "more than 65535 pairs of an input and an expert" : nullptr;
}

const char* why_mx_experts(const ExpertSizes& sizes, uint32_t matrices, mx::Stream stream) {
  const bool wins = sizes.rows > most_single_rows && !are_exact(sizes) &&
                    (!takes_expert_tiles(sizes, matrices, stream) || gpu_of(stream).has_matrix_units);
  return stream.device == mx::Device::gpu && wins ? "more than 64 rows of results" : nullptr;
}

bool chooses_in_experts(mx::Stream stream) {
  return runs_apple_kernels(stream) && !is_exact();
}

bool has_all_routes(mx::Stream stream) {
  return !runs_kernels(stream) || runs_apple_kernels(stream);
}

cpu::ProductMode native_mode(const Numerics& numerics, size_t rows) {
  return {numerics.exact && rows <= most_exact_rows, numerics.int8};
}

bool shares_experts(const QuantizedFormat& format, uint32_t matrices, size_t pairs, size_t experts) {
  // From there on it was faster on an H100 (bench/results/h100.md); predicted for Apple GPUs in shared-experts.md.
  return !is_exact() && has_common_kernels(format) && experts > 0 && matrices * pairs >= 2 * experts;
}

uint32_t expert_tile_rows(const QuantizedFormat& format) {
  return plan_tiles(quantized_tiles(format, 1), {1, 64, 1, 1}).rows;  // the larger of the format's
}

bool has_dense_expert_tiles(size_t columns, size_t outputs, mx::Dtype dtype) {
  // Rows of whole 16 bytes, and offsets of 32 bits in a matrix.
  return columns > 0 && columns * mx::size_of(dtype) % 16 == 0 && outputs < most_elements / columns;
}

ExpertTilesPlan plan_expert_tiles(uint32_t tile_rows, const ExpertSizes& sizes) {
  const uint32_t rows = static_cast<uint32_t>(sizes.rows);
  // Each expert with rows, and the pairs that are out of range, may end in a tile that is not full.
  const uint32_t ends = static_cast<uint32_t>(std::min(sizes.experts + 1, sizes.rows));
  const uint32_t tiles = ends + (rows - ends) / tile_rows;
  const uint32_t bands = ceil_divide(tiles, uint32_t(kTileBand));
  return {tile_rows, bands == 1 ? tiles : bands * kTileBand};
}

void share_out_tiles(Launch& launch, const ExpertTilesPlan& plan, uint32_t outputs, uint32_t matrices) {
  share_out(launch, TilesPlan{plan.tile_rows, plan.tiles, ceil_divide(outputs, kTileOutputs / matrices)}, 1);
}

void share_out_pairs(Launch& launch, const ProductSizes& sizes, uint32_t outputs, mx::Stream stream) {
  const RowsPlan plan = plan_places(sizes, outputs, stream);
  give_grid(launch, sizes, ceil_divide(plan.output_blocks, plan.blocks));
  launch.threads = {32 * plan.sharers, plan.blocks, 1};
}

void share_out_chosen(Launch& launch, const ProductSizes& sizes, uint32_t outputs, mx::Stream stream) {
  RowsPlan plan = plan_places(sizes, outputs, stream);
  plan.blocks = std::min(std::max(kProductSimdgroups / plan.sharers, 1u), plan.output_blocks);
  give_grid(launch, sizes, ceil_divide(plan.output_blocks, plan.blocks));
  launch.threads = {32 * plan.sharers, plan.blocks, 1};
}

void share_out_sums(Launch& launch, const ProductSizes& sizes, uint32_t outputs, uint32_t chosen, mx::Stream stream) {
  give_grid(launch, sizes, plan_places(sizes, outputs, stream).output_blocks);
  launch.threads = {32 * chosen, 1, 1};
}

void share_out_dense(Launch& launch, const ProductSizes& sizes) {
  constexpr uint32_t most_simdgroups = 2;
  const uint32_t blocks = ceil_divide(sizes.outputs, uint32_t(kGatherOutputs));
  const uint32_t simdgroups = std::min(blocks, most_simdgroups);
  give_grid(launch, sizes, ceil_divide(blocks, simdgroups));
  launch.threads = {32 * simdgroups, 1, 1};
}

}  // namespace mittens
