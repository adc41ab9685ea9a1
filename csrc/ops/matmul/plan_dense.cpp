// Plans of products with dense weights, masked blocks included.
#include "ops/matmul/plan_parts.h"

#include <algorithm>
#include <bit>

#include "params/matmul.h"
#include "runtime/array_layout.h"
#include "runtime/fallback.h"

namespace mittens {

namespace {

// On NVIDIA GPUs 8x8 matrices are the tensor cores', which take a product in float32 apart into three.
constexpr Schedule<GemvKernel> gemv_schedules[] = {
    {"short", GemvKernel::short_row, Where::nvidia, any_rows, any_rows, 1},
    {"tiles", GemvKernel::tiles, Where::nvidia, 3, 4, unlimited_rows},
    {"tiles", GemvKernel::tiles, Where::apple, 5, 5, unlimited_rows},
    {"rows", GemvKernel::rows, Where::anywhere, any_rows, any_rows, unlimited_rows},
};

// How a kernel on rows of weights divides its work.
struct GemvShape {
  uint32_t outputs;  // of a threadgroup
  uint32_t chunk;  // columns that a simdgroup takes at once
  uint32_t steps;  // chunks that keep it busy
  uint32_t shares;  // how many times as many pay for a split's second kernel, which adds the splits up
  uint32_t rows;  // of x that a threadgroup takes
};

// matmul/gemv.metal.
GemvShape gemv_rows_shape(mx::Dtype dtype, uint32_t rows) {
  const uint32_t pack = 16 / mx::size_of(dtype);
  const uint32_t together = std::min<uint32_t>(std::bit_ceil(std::max(rows, 1u)), most_gemv_rows);
  return {static_cast<uint32_t>(gemv_outputs(static_cast<int>(together))), 32 * pack, 2, 2, together};
}

// matmul/gemv_tiles.metal. Many outputs let a threadgroup have 32, so that less of x is loaded beside the weights; 16
// rows in float32 leave no registers for them.
GemvShape gemv_tiles_shape(mx::Dtype dtype, uint32_t rows, uint32_t outputs) {
  constexpr uint32_t many_outputs = 8192;
  constexpr uint32_t busy_columns = 256;  // that keep a simdgroup busy
  const int together = rows > 8 ? 16 : 8;
  const int own_outputs = outputs >= many_outputs && (rows <= 8 || dtype != mx::float32) ? 32 : 16;
  const uint32_t chunk = gemv_runs(together, own_outputs) * kGemvRunBytes / mx::size_of(dtype);
  return {static_cast<uint32_t>(own_outputs), chunk, busy_columns / chunk, 4, static_cast<uint32_t>(together)};
}

// The loads of a lane that cover a row of `packs`, 0 where matmul/nvidia/gemv_short.metal has no kernel for it.
uint32_t short_loads(uint32_t packs) {
  for (uint32_t loads : {4u, 5u, 8u}) {
    if (packs <= 32 * loads) {
      return loads;
    }
  }
  return 0;
}

// Where mx's products of matrices are ahead of ours on an H200 (bench/results/h200.json and h200-repeated.md). Of few
// rows in half types they are where outputs are many and w is [columns, outputs], which has no kernel of matrices.
bool tensor_cores_win(const ProductSizes& sizes, bool transpose, mx::Dtype dtype) {
  if (sizes.rows > 8) {
    return uint64_t(sizes.columns) * sizes.outputs > (1 << 22);
  }
  return !transpose && dtype != mx::float32 && sizes.rows > 2 && sizes.outputs > 4096;
}

// Where mx goes over to an Apple GPU's matrix units, but for rows so few that reading the weights takes longer. It has
// kernels without them for up to 15 rows in half types.
bool matrix_units_win(const ProductSizes& sizes, bool transpose, mx::Dtype dtype) {
  const bool is_gemv_wide = transpose && dtype != mx::float32 && sizes.columns % 4 == 0 && sizes.rows <= 15;
  return sizes.rows > 8 && !is_gemv_wide;
}

// Outputs of a threadgroup of matmul/apple/matmul_tiles.metal.
TilesKernels dense_tiles(bool transpose, mx::Dtype dtype) {
  constexpr uint32_t outputs = kTileOutputs;
  return {transpose ? outputs : 2 * outputs, dtype == mx::bfloat16 ? outputs : 0};
}

// Rows of x that these tiles serve at most. Of many rows mx's kernels are at 80 % of the peak of GPUs that multiply
// their type: only where bfloat takes conversions ours are ahead. Of few rows mx's tiles are half empty, or of 16 rows.
uint32_t most_dense_rows(const Gpu& gpu, bool transpose, mx::Dtype dtype) {
  const bool is_early = !gpu.caches_registers;
  if (gpu.vendor != Gpu::Vendor::apple || gpu.has_matrix_units || (!is_early && !transpose)) {
    return 0;
  }
  if (dtype == mx::bfloat16 && is_early) {
    return unlimited_rows;
  }
  return !transpose ? 0 : is_early ? 64 : 32;
}

const Schedules of_gemv({"gemv"}, gemv_schedules);

// Shares the columns out to simdgroups and splits.
void share_columns(GemvPlan& plan, const GemvShape& shape, const ProductSizes& sizes, uint32_t most_splits,
                   const Gpu& gpu) {
  plan.rows = shape.rows;
  plan.outputs_per_group = shape.outputs;
  plan.chunk = shape.chunk;
  const uint32_t chunks = ceil_divide(std::max(sizes.columns, 1u), shape.chunk);
  const uint32_t shares = ceil_divide(chunks, shape.steps);
  const uint64_t groups = uint64_t(ceil_divide(std::max(sizes.outputs, 1u), shape.outputs)) *
                          ceil_divide(std::max(sizes.rows, 1u), shape.rows);
  const uint32_t most = std::min(shares, uint32_t(kProductSimdgroups));
  const uint32_t fewest = std::min(shares, 4u);
  if (plan.kernel == GemvKernel::tiles) {
    plan.simdgroups = plan_tile_simdgroups(groups, chunks, {229, 128}, fewest, most, gpu);
  } else {
    plan.simdgroups = std::clamp(ceil_divide(wanted_simdgroups(gpu), groups), fewest, most);
    // Most of a GPU is idle while it runs the few that were left over.
    const uint64_t resident_simdgroups = uint64_t(gpu.cores) * gpu.resident_simdgroups({143, 72});
    const uint64_t launched = groups * plan.simdgroups;
    if (shape.rows == 1 && launched > resident_simdgroups && launched < 2 * resident_simdgroups &&
        plan.simdgroups < shares) {
      plan.simdgroups /= 2;
    }
  }
  const uint32_t worthwhile = std::min(ceil_divide(shares, shape.shares * plan.simdgroups), most_splits);
  const uint32_t splits = std::clamp(ceil_divide(wanted_simdgroups(gpu) / 4, groups * plan.simdgroups), 1u, worthwhile);
  const uint32_t chunks_per_split = ceil_divide(chunks, splits);
  plan.splits = ceil_divide(chunks, chunks_per_split);
  plan.columns_per_split = chunks_per_split * shape.chunk;
}

}  // namespace

GemvPlan plan_gemv(const ProductSizes& sizes, mx::Dtype dtype, GemvWeights weights, uint32_t most_splits,
                   mx::Stream stream) {
  const Choice choice = calibrated(product_problem("gemv", dtype, true, sizes), stream);
  const Gpu gpu = gpu_of(stream).with_parallelism(choice.parallelism);
  const uint32_t loads = short_loads(ceil_divide(sizes.columns, 16 / mx::size_of(dtype)));
  const GemvShape tiles = gemv_tiles_shape(dtype, sizes.rows, sizes.outputs);
  GemvPlan plan{};
  plan.kernel = choose(gemv_schedules, gpu, dtype, sizes.rows, choice.schedule, [&](GemvKernel kernel) {
    switch (kernel) {
      case GemvKernel::short_row:
        return weights.packs && sizes.rows == 1 && loads > 0;
      case GemvKernel::tiles:  // which have all of their outputs
        return weights.packs && weights.short_strides && sizes.outputs >= tiles.outputs;
      case GemvKernel::rows:
        return true;
    }
    return false;
  });
  if (plan.kernel == GemvKernel::short_row) {
    plan.rows = plan.splits = 1;
    plan.columns_per_split = sizes.columns;
    plan.simdgroups = plan.outputs_per_group = kShortSimdgroups;
    plan.loads = loads;
    return plan;
  }
  const GemvShape shape = plan.kernel == GemvKernel::tiles ? tiles : gemv_rows_shape(dtype, sizes.rows);
  share_columns(plan, shape, sizes, most_splits, gpu);
  return plan;
}

GemvPlan plan_gemv_exact(const ProductSizes& sizes, mx::Dtype dtype, uint32_t most_splits, mx::Stream stream) {
  GemvPlan plan{};
  plan.kernel = GemvKernel::rows;
  share_columns(plan, gemv_rows_shape(dtype, 1), {1, 1, sizes.columns, sizes.outputs}, most_splits, gpu_of(stream));
  plan.rows = std::min(std::bit_ceil(std::max(sizes.rows, 1u)), uint32_t(kMostExactRows));
  return plan;
}

bool has_dense_tiles(const ProductSizes& sizes, bool transpose, mx::Dtype dtype, mx::Stream stream) {
  if (!runs_kernels(stream) || sizes.rows <= most_gemv_rows) {
    return false;
  }
  const uint32_t row = transpose ? sizes.columns : sizes.outputs;  // of weights, in whole 16 bytes
  const bool fits = uint64_t(sizes.columns) * sizes.outputs < (uint64_t(1) << 32);  // offsets of 32 bits
  return sizes.rows <= most_dense_rows(gpu_of(stream), transpose, dtype) && fits && row > 0 &&
         row * mx::size_of(dtype) % 16 == 0 && has_tile_outputs(dense_tiles(transpose, dtype), sizes);
}

TilesPlan plan_dense_tiles(const ProductSizes& sizes, bool transpose, mx::Dtype dtype) {
  return plan_tiles(dense_tiles(transpose, dtype), sizes);
}

const char* why_mx_gemv(const ProductSizes& sizes, bool transpose, mx::Dtype dtype, mx::Stream stream) {
  if (!runs_kernels(stream)) {
    return nullptr;
  }
  const Gpu& gpu = gpu_of(stream);
  if (has_dense_tiles(sizes, transpose, dtype, stream)) {
    return keep_busy(dense_tiles(transpose, dtype), sizes, gpu) ? nullptr : few_tiles;
  }
  if (gpu.vendor == Gpu::Vendor::nvidia) {
    return tensor_cores_win(sizes, transpose, dtype) ? tensor_cores : nullptr;
  }
  return mlx_uses_matrix_units(gpu, dtype) && matrix_units_win(sizes, transpose, dtype) ? matrix_units : nullptr;
}

MaskedPlan plan_masked(const ProductSizes& sizes, bool transpose, int block_size, bool is_scaled, mx::Dtype dtype,
                       mx::Stream stream) {
  const Gpu& gpu = gpu_of(stream);
  const bool is_wide = dtype == mx::float32;
  MaskedPlan plan{.by_tiles = sizes.rows > 1};
  Launch launch;
  if (!plan.by_tiles && transpose) {
    share_out(launch, plan_rows(sizes, kRowOutputs, gpu, 1), sizes.matrices);
  } else if (!plan.by_tiles) {
    const uint32_t owned = 16 / mx::size_of(dtype);
    launch.threadgroups = {ceil_divide(sizes.outputs, kMaskedLanes * owned), 1, sizes.matrices};
    launch.threads = {32 * kOutputSimdgroups, 1, 1};
  } else {
    const uint32_t outputs = block_size;
    const bool has_64 = transpose && block_size == 64 && !(is_scaled && dtype == mx::bfloat16);
    TilesPlan tiles = plan_tiles({outputs, has_64 ? outputs : 0}, sizes);
    if (block_size == 64 && !transpose) {
      tiles = {64, ceil_divide(sizes.rows, 64u), tiles.output_groups};
    } else if (tiles.rows == 64 && !keep_busy(tiles_of(tiles, sizes), gpu)) {
      tiles = plan_tiles({outputs, 0}, sizes);
    }
    share_out(launch, tiles, sizes.matrices);
    const bool has_two = block_size == 32 && (transpose || !is_wide);  // simdgroups
    launch.threads = {32 * (has_two ? 2u : uint32_t(kTileSimdgroups)), 1, 1};
    plan.rows = tiles.rows;
    plan.outputs = outputs;
  }
  plan.threadgroups = launch.threadgroups;
  plan.threads = launch.threads;
  return plan;
}

const char* why_no_masked_kernel(const ProductSizes& sizes, mx::Dtype dtype, mx::Stream stream) {
  constexpr uint32_t fewest_outputs = 16;  // of a simdgroup
  if (!runs_kernels(stream)) {
    return nullptr;
  }
  if (gpu_of(stream).vendor != Gpu::Vendor::apple) {
    return "masked blocks on an NVIDIA GPU";
  }
  if (sizes.columns * mx::size_of(dtype) % 16 != 0) {
    return "columns that are not whole 16 bytes";
  }
  if (uint64_t(sizes.columns) * sizes.outputs >= uint64_t(1) << 32) {
    return "matrices of 2^32 elements or more";
  }
  return sizes.rows > 1 && sizes.outputs < fewest_outputs ? "fewer than 16 outputs" : nullptr;
}

bool mx_has_masked(mx::Stream stream) {
  return stream.device == mx::Device::gpu && gpu_of(stream).vendor == Gpu::Vendor::apple;
}

}  // namespace mittens
