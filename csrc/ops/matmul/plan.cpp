// Shared by the plans of products: how rows and tiles are shared out, and where mx is preferred.
#include "ops/matmul/plan.h"

#include <algorithm>
#include <bit>

#include "ops/matmul/plan_parts.h"
#include "params/matmul.h"
#include "runtime/array_layout.h"
#include "runtime/fallback.h"
#include "runtime/numerics.h"

namespace mittens {

namespace {

// How many simdgroups split K. Prefers 4, which read faster than 8 (bench/results/h200-repeated.md); 5 or 3 if 4 would
// leave more than 1/7 of the last round idle; more only where few outputs would leave a GPU idle.
uint32_t simdgroups_for(uint32_t chunks, uint64_t outputs, const Gpu& gpu) {
  const uint64_t few_outputs = std::max(2 * gpu.cores, 8u) - 8;
  if (outputs < few_outputs) {
    return ceil_divide(chunks, ceil_divide(chunks, kProductSimdgroups));
  }
  auto taken = [&](uint32_t n) { return ceil_divide(chunks, n) * n; };
  uint32_t best = std::min(chunks, 4u);
  if (taken(best) * 6 > chunks * 7) {
    for (uint32_t simdgroups : {5u, 3u}) {
      best = taken(simdgroups) < taken(best) ? simdgroups : best;
    }
  }
  return best;
}

// Of matmul/qmv.metal and matmul/quantized_swiglu.metal; most of matmul/gguf_matmul.metal take less.
Registers rows_registers(uint32_t rows) {
  return rows == 1 ? Registers{139, 128} : rows == 2 ? Registers{193, 128} : Registers{211, 128};
}

}  // namespace

uint32_t wanted_simdgroups(const Gpu& gpu) {
  return 31 * gpu.cores;
}

RowProductsPlan plan_row_products(uint32_t chunks, uint64_t outputs, uint32_t products, Registers registers,
                                  const Gpu& gpu) {
  constexpr uint64_t batched = 4;  // outputs whose weights a lane loads at once
  constexpr uint64_t most_outputs = 32;  // with one product each; with more a threadgroup has other work besides
  const uint64_t resident_simdgroups = uint64_t(gpu.cores) * gpu.resident_simdgroups(registers);
  RowProductsPlan plan{};
  plan.simdgroups = simdgroups_for(chunks, outputs, gpu);
  // As many simdgroups as are resident: as much as possible is on its way then, and none waits for another to end.
  const uint64_t wanted = ceil_divide(outputs * plan.simdgroups, resident_simdgroups * batched) * batched;
  const uint64_t fitting = kProductPartials / (plan.simdgroups * products) / batched * batched;
  const uint64_t most = std::min(products == 1 ? most_outputs : 2 * most_outputs, fitting);
  plan.outputs_per_group = static_cast<uint32_t>(std::clamp(wanted, batched, most));
  return plan;
}

uint32_t plan_tile_simdgroups(uint64_t threadgroups, uint32_t chunks, Registers registers, uint32_t fewest,
                              uint32_t most, const Gpu& gpu) {
  const uint32_t resident_simdgroups = gpu.resident_simdgroups(registers);  // of a core
  uint32_t best = fewest;
  uint64_t fewest_rounds = std::numeric_limits<uint64_t>::max();
  for (uint32_t simdgroups = fewest; simdgroups <= most; ++simdgroups) {
    const uint32_t resident_threadgroups = std::max(resident_simdgroups / simdgroups, 1u);
    const uint64_t waves = ceil_divide(threadgroups, uint64_t(gpu.cores) * resident_threadgroups);
    const uint64_t rounds = waves * ceil_divide(chunks, simdgroups);
    if (rounds < fewest_rounds) {
      fewest_rounds = rounds;
      best = simdgroups;
    }
  }
  return best;
}

bool has_tile_outputs(const TilesKernels& kernels, const ProductSizes& sizes) {
  return sizes.outputs >= kernels.outputs_32 / kTileSimdgroups;
}

uint64_t tiles_of(const TilesPlan& plan, const ProductSizes& sizes) {
  return uint64_t(plan.row_blocks) * plan.output_groups * sizes.matrices;
}

bool keep_busy(uint64_t tiles, const Gpu& gpu) {
  const uint64_t rounds = ceil_divide(tiles, gpu.cores);
  const bool hides_latencies = tiles * 2 >= uint64_t(gpu.cores) * 3;  // one tile alone on a core does not
  return hides_latencies && tiles * 5 >= rounds * gpu.cores * 4;
}

bool keep_busy(const TilesKernels& kernels, const ProductSizes& sizes, const Gpu& gpu) {
  return has_tile_outputs(kernels, sizes) && keep_busy(tiles_of(plan_tiles(kernels, sizes), sizes), gpu);
}

const char* why_mx_tiles(const TilesKernels& kernels, mx::Dtype dtype, const ProductSizes& sizes, const Gpu& gpu) {
  if (mlx_uses_matrix_units(gpu, dtype)) {
    return matrix_units;
  }
  return keep_busy(kernels, sizes, gpu) ? nullptr : few_tiles;
}

Problem product_problem(const char* op, mx::Dtype dtype, uint32_t format, const ProductSizes& sizes) {
  return {op, dtype, format, {sizes.matrices, sizes.rows, sizes.columns, sizes.outputs}};
}

uint32_t format_number(const QuantizedFormat& format) {
  return ((static_cast<uint32_t>(format.mode) * 10 + format.bits) * 1000 + format.group_size) * 2 + format.transpose;
}

RowsPlan plan_rows(const ProductSizes& sizes, uint32_t outputs, const Gpu& gpu, uint32_t most_rows) {
  constexpr uint32_t few_simdgroups = 2;  // of a threadgroup that shares no columns
  RowsPlan plan;
  plan.rows = std::min(std::bit_ceil(std::max(sizes.rows, 1u)), most_rows);
  plan.row_blocks = ceil_divide(sizes.rows, plan.rows);
  // Of fewer outputs than a simdgroup has each has a simdgroup.
  plan.output_blocks = sizes.outputs < outputs ? sizes.outputs : ceil_divide(sizes.outputs, outputs);
  const uint64_t blocks = std::max(uint64_t(plan.output_blocks) * plan.row_blocks * sizes.matrices, uint64_t(1));
  const uint32_t steps = ceil_divide(sizes.columns, 32u * kRunColumns);
  // Half of the simdgroups that an Apple GPU holds read as fast, and leave fewer sums to add up.
  const uint64_t busy = gpu.vendor == Gpu::Vendor::nvidia ? 1 : 2;
  const uint64_t resident_simdgroups = uint64_t(gpu.cores) * gpu.resident_simdgroups(rows_registers(plan.rows));
  const uint64_t wanted = ceil_divide(resident_simdgroups, busy * blocks);
  plan.sharers =
      static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, std::clamp<uint32_t>(steps, 1, kProductSimdgroups)));
  plan.blocks = std::max(few_simdgroups / plan.sharers, 1u);
  return plan;
}

RowsPlan plan_rows(const ProductSizes& sizes, uint32_t outputs, mx::Stream stream) {
  return plan_rows(sizes, outputs, gpu_of(stream));
}

bool multiplies_several(mx::Stream stream) {
  return runs_apple_kernels(stream) && !is_exact();
}

bool shares_norm(mx::Stream stream) {
  return runs_apple_kernels(stream) && !is_exact();
}

void share_out(Launch& launch, const RowsPlan& plan, uint32_t matrices) {
  launch.threadgroups = {ceil_divide(plan.output_blocks, plan.blocks), plan.row_blocks, matrices};
  launch.threads = {32 * plan.sharers, plan.blocks, 1};
}

MatricesPlan plan_matrices(const ProductSizes& sizes, uint32_t outputs, const Gpu& gpu) {
  constexpr uint32_t most_row_blocks = 2;
  MatricesPlan plan;
  const uint32_t row_blocks = ceil_divide(std::max(sizes.rows, 1u), uint32_t(kMatrixRows));
  plan.row_blocks = std::min(row_blocks, most_row_blocks);
  plan.row_groups = ceil_divide(row_blocks, plan.row_blocks);
  plan.output_blocks = ceil_divide(std::max(sizes.outputs, 1u), outputs);
  const uint64_t blocks = uint64_t(plan.output_blocks) * plan.row_groups * plan.row_blocks * sizes.matrices;
  const uint64_t resident_simdgroups = uint64_t(gpu.cores) * gpu.resident_simdgroups(matrices_registers);
  const uint64_t wanted = ceil_divide(resident_simdgroups, std::max(blocks, uint64_t(1)));
  const uint32_t most =
      std::min(std::max(ceil_divide(sizes.columns, uint32_t(kMatrixStep)), 1u), kProductSimdgroups / plan.row_blocks);
  plan.sharers = static_cast<uint32_t>(std::clamp<uint64_t>(wanted, 1, most));
  return plan;
}

void share_out(Launch& launch, const MatricesPlan& plan, uint32_t matrices) {
  launch.threadgroups = {plan.output_blocks, plan.row_groups, matrices};
  launch.threads = {32 * plan.sharers, plan.row_blocks, 1};
}

TilesPlan plan_tiles(const TilesKernels& kernels, const ProductSizes& sizes) {
  TilesPlan plan;
  // Blocks of 32 rows take longer for each row, but may leave less of the last one idle.
  const uint64_t by_32 = uint64_t(ceil_divide(sizes.rows, 32u)) * 32;
  const uint64_t by_64 = uint64_t(ceil_divide(sizes.rows, 64u)) * 64;
  plan.rows = kernels.outputs_64 != 0 && by_64 * 100 <= by_32 * 108 ? 64 : 32;
  plan.row_blocks = ceil_divide(sizes.rows, plan.rows);
  const uint32_t outputs = plan.rows == 64 ? kernels.outputs_64 : kernels.outputs_32;
  plan.output_groups = ceil_divide(std::max(sizes.outputs, 1u), outputs);
  return plan;
}

void share_out(Launch& launch, const TilesPlan& plan, uint32_t matrices) {
  launch.threadgroups = {std::min(plan.row_blocks, uint32_t(kTileBand)), plan.output_groups,
                         matrices * ceil_divide(plan.row_blocks, uint32_t(kTileBand))};
  launch.threads = {32 * kTileSimdgroups, 1, 1};
}

bool is_exact_by_plan(size_t rows, mx::Stream stream) {
  return are_few_exact(rows) && runs_apple_kernels(stream);
}

bool prefer_mx_product(const Problem& problem, const char* reason, mx::Stream stream, const char* called) {
  const uint32_t matrices = problem.sizes[0], rows = problem.sizes[1];
  if (is_exact() && matrices == 1 && are_few_exact(rows) && runs_kernels(stream)) {
    return is_switched_off(called ? called : problem.op);
  }
  return prefer_mx(problem, reason, stream, called);
}

bool gates_exact_rows(mx::Stream stream) {
  return !runs_kernels(stream) || runs_apple_kernels(stream);
}

}  // namespace mittens
