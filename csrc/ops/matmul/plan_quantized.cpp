// Plans of products with weights of every mode of mx.quantize.
#include "ops/matmul/plan_parts.h"

#include <algorithm>
#include <bit>

#include "params/matmul.h"
#include "runtime/array_layout.h"
#include "runtime/checks.h"
#include "runtime/fallback.h"

namespace mittens {

namespace {

// On NVIDIA GPUs matrices of floats never pay: they go through shuffles. One row is a product of matrices there, since
// tensor cores are many times faster than unpacking the weights.
constexpr Schedule<QuantizedKernel> quantized_schedules[] = {
    {"mma_row", QuantizedKernel::mma_row, Where::nvidia, any_rows, unlimited_rows, 1},
    {"tiles", QuantizedKernel::tiles, Where::nvidia, 2, unlimited_rows, unlimited_rows},
    {"rows", QuantizedKernel::rows, Where::nvidia, any_rows, any_rows, unlimited_rows},
    {"qmm_tiles", QuantizedKernel::qmm_tiles, Where::apple, most_gemv_rows + 1, most_gemv_rows + 1, unlimited_rows},
    {"qmv", QuantizedKernel::qmv, Where::anywhere, any_rows, any_rows, unlimited_rows},
    {"qmm", QuantizedKernel::qmm, Where::anywhere, any_rows, any_rows, unlimited_rows},
};

// Of matmul/nvidia/tiles.metal.
Registers tiles_registers(const QuantizedFormat& format, uint32_t rows, uint32_t run) {
  const uint32_t most = run == 32 ? (format.bits == 4 ? 128 : 80) : format.bits == 4 ? 168 : rows <= 8 ? 96 : 128;
  return {255, most};
}

void plan_quantized_rows(QuantizedPlan& plan, const QuantizedKernels& kernels, const QuantizedFormat& format,
                         const ProductSizes& sizes, const Gpu& gpu) {
  const uint32_t together = std::min(std::bit_ceil(std::max(sizes.rows, 1u)), kernels.most_rows);
  const uint32_t lane_columns = lane_words(format.bits, static_cast<int>(together)) * 32 / format.bits;
  const uint32_t chunks = ceil_divide(sizes.columns, 32 * lane_columns);
  const uint64_t each = uint64_t(sizes.outputs) * sizes.matrices * ceil_divide(sizes.rows, together);
  const Registers registers{255, together > 2 ? 255u : 128u};
  static_cast<RowProductsPlan&>(plan) = plan_row_products(chunks, each, together * kernels.matrices, registers, gpu);
  plan.rows = together;
}

void plan_quantized_mma_row(QuantizedPlan& plan, const QuantizedKernels& kernels, const ProductSizes& sizes,
                            const Gpu& gpu) {
  constexpr uint32_t products = 8 * kRowBlocks;  // of a simdgroup
  const uint32_t resident_simdgroups = gpu.cores * gpu.resident_simdgroups({207, 128});
  plan.rows = 1;
  plan.outputs_per_group = products / kernels.matrices;
  const uint32_t groups = ceil_divide(std::max(sizes.outputs, 1u), plan.outputs_per_group) * sizes.matrices;
  const uint32_t chunks = ceil_divide(sizes.columns, kRowStep);
  const uint32_t wanted = std::min({std::max(resident_simdgroups / groups, 2u), chunks, uint32_t(kRowSimdgroups)});
  plan.simdgroups = ceil_divide(chunks, ceil_divide(chunks, wanted));  // none has a round less than another needs
}

void plan_quantized_tiles(QuantizedPlan& plan, const QuantizedFormat& format, const ProductSizes& sizes,
                          const Gpu& gpu) {
  constexpr uint32_t fewest_columns = 256;  // that a simdgroup is left with
  plan.rows = sizes.rows <= 8 ? 8 : 16;
  plan.run = format.group_size == 32 ? 32 : 64;
  plan.outputs_per_group = affine_tile_outputs(format.bits);
  const uint32_t runs = affine_tile_runs(format.bits, static_cast<int>(plan.rows));
  const uint32_t chunks = ceil_divide(sizes.columns, plan.run * runs);
  const uint64_t groups = uint64_t(ceil_divide(std::max(sizes.outputs, 1u), plan.outputs_per_group)) * sizes.matrices *
                          ceil_divide(std::max(sizes.rows, 1u), plan.rows);
  const uint32_t most = std::clamp(ceil_divide(sizes.columns, fewest_columns), 1u, uint32_t(kProductSimdgroups));
  plan.simdgroups = plan_tile_simdgroups(groups, chunks, tiles_registers(format, plan.rows, plan.run), 1, most, gpu);
}

// Splits the columns of tiles of 32 rows into the fewest parts that keep a GPU busy. Does not split where whole tiles
// do, or where no number of parts does.
SplitTilesPlan plan_split_tiles(const TilesKernels& kernels, uint32_t matrices, const ProductSizes& sizes,
                                const Gpu& gpu) {
  constexpr uint32_t most_splits = 8;
  constexpr uint32_t fewest_columns = 256;  // of a split
  constexpr uint32_t step = 128;  // that every format takes at once, and its groups divide
  const SplitTilesPlan alone{plan_tiles(kernels, sizes), {1, sizes.columns}};
  const TilesPlan by_32 = plan_tiles({kernels.outputs_32, 0}, sizes);
  if (matrices > 1 || by_32.row_blocks > kTileBand || keep_busy(tiles_of(alone, sizes), gpu)) {
    return alone;
  }
  for (uint32_t wanted = 1; wanted <= most_splits && sizes.columns >= wanted * fewest_columns; wanted *= 2) {
    const uint32_t columns = ceil_divide(ceil_divide(sizes.columns, wanted), step) * step;
    const uint32_t splits = ceil_divide(sizes.columns, columns);
    if (keep_busy(tiles_of(by_32, sizes) * splits, gpu)) {
      return {by_32, {splits, columns}};
    }
  }
  return alone;
}

const Schedules of_quantized({"quantized_matmul", "quantized_swiglu"}, quantized_schedules);

// Up to these many rows NVIDIA's tiles of 16 rows take less time than mx's product (bench/results/h200-batches.json).
constexpr uint32_t most_nvidia_rows = 64;

// The outputs that simdgroups of matmul/qmv.metal and matmul/quantized_swiglu.metal have.
void give_outputs(RowsPlan& plan, const QuantizedKernels& kernels, mx::Dtype dtype, const ProductSizes& sizes) {
  const int all = row_outputs(static_cast<int>(plan.rows), static_cast<int>(mx::size_of(dtype)));
  const uint32_t outputs = all / kernels.matrices;
  plan.output_blocks = sizes.outputs < outputs ? sizes.outputs : ceil_divide(sizes.outputs, outputs);
}

}  // namespace

TilesKernels quantized_tiles(const QuantizedFormat& format, uint32_t matrices) {
  const bool has_64 = has_affine_kernels(format) || !format.has_biases();
  const uint32_t outputs_32 = format.transpose ? kTileOutputs / matrices : 2 * kTileOutputs;
  return {outputs_32, has_64 ? kTileOutputs / matrices : 0};
}

QuantizedPlan plan_quantized(const QuantizedKernels& kernels, const QuantizedFormat& format, mx::Dtype dtype,
                             const ProductSizes& sizes, mx::Stream stream) {
  const Choice choice = calibrated(product_problem(kernels.op, dtype, format_number(format), sizes), stream);
  const Gpu gpu = gpu_of(stream).with_parallelism(choice.parallelism);
  const bool all = has_affine_kernels(format);
  const uint32_t most_rows = all ? 4 : 1;  // of x in the kernel by rows, which rare formats have for one
  QuantizedPlan plan{};
  plan.kernel = choose(quantized_schedules, gpu, dtype, sizes.rows, choice.schedule, [&](QuantizedKernel kernel) {
    switch (kernel) {
      case QuantizedKernel::mma_row:
        return all && sizes.rows == 1 && dtype != mx::float32 && format.bits == 4 && format.group_size >= 64;
      case QuantizedKernel::tiles:
        return all && kernels.has_tiles && dtype != mx::float32;
      case QuantizedKernel::rows:
        return all && (!kernels.has_tiles || dtype == mx::float32 || sizes.rows <= 1);
      case QuantizedKernel::qmm_tiles:
        return kernels.has_qmm_tiles && has_tile_outputs(quantized_tiles(format, kernels.matrices), sizes);
      case QuantizedKernel::qmm:
        return true;
      case QuantizedKernel::qmv:
        return sizes.rows <= most_rows;
    }
    return false;
  });
  switch (plan.kernel) {
    case QuantizedKernel::mma_row:
      plan_quantized_mma_row(plan, kernels, sizes, gpu);
      break;
    case QuantizedKernel::tiles:
      plan_quantized_tiles(plan, format, sizes, gpu);
      break;
    case QuantizedKernel::rows:
      plan_quantized_rows(plan, kernels, format, sizes, gpu);
      break;
    case QuantizedKernel::qmm_tiles:
      plan.by_tiles = plan_split_tiles(quantized_tiles(format, kernels.matrices), kernels.matrices, sizes, gpu);
      break;
    case QuantizedKernel::qmm:
      plan.by_matrices = plan_matrices(sizes, kMatrixOutputs / kernels.matrices, gpu);
      break;
    case QuantizedKernel::qmv:
      plan.shared = plan_rows(sizes, kRowOutputs / kernels.matrices, gpu, most_rows);
      give_outputs(plan.shared, kernels, dtype, sizes);
      break;
  }
  return plan;
}

QuantizedPlan plan_quantized_exact(const QuantizedKernels& kernels, const QuantizedFormat& format, mx::Dtype dtype,
                                   const ProductSizes& sizes, mx::Stream stream) {
  constexpr uint32_t tile_rows = 8;
  const Gpu& gpu = gpu_of(stream);
  QuantizedPlan plan{};
  if (gpu.vendor == Gpu::Vendor::nvidia && has_affine_kernels(format)) {
    const bool has_tiles = kernels.has_tiles && dtype != mx::float32;
    plan.kernel = has_tiles ? QuantizedKernel::tiles : QuantizedKernel::rows;
    if (has_tiles) {
      plan_quantized_tiles(plan, format, {1, tile_rows, sizes.columns, sizes.outputs}, gpu);
    } else {
      plan_quantized_rows(plan, kernels, format, {1, 1, sizes.columns, sizes.outputs}, gpu);
    }
    return plan;
  }
  // Sharers as of one row; the rows and outputs of a simdgroup change no sum.
  plan.kernel = QuantizedKernel::qmv;
  plan.shared = plan_rows({1, 1, sizes.columns, sizes.outputs}, kRowOutputs / kernels.matrices, gpu, 1);
  if (has_common_kernels(format) && gpu.vendor == Gpu::Vendor::apple) {
    plan.shared.rows = std::min(std::bit_ceil(std::max(sizes.rows, 1u)), uint32_t(kMostExactRows));
  }
  plan.shared.row_blocks = ceil_divide(sizes.rows, plan.shared.rows);
  give_outputs(plan.shared, kernels, dtype, sizes);
  return plan;
}

uint32_t most_quantized_rows(const QuantizedKernels& kernels, mx::Stream stream) {
  if (stream.device != mx::Device::gpu) {
    return unlimited_rows;
  }
  if (gpu_of(stream).vendor == Gpu::Vendor::apple) {
    return kernels.has_qmm_tiles ? unlimited_rows : most_gemv_rows;
  }
  return kernels.has_tiles ? most_nvidia_rows : most_gemv_rows;
}

bool multiplies_int8(const QuantizedFormat& format, const ProductSizes& sizes, mx::Stream stream) {
  const bool is_covered = format.transpose && format.has_biases() && format.bits == 4 && sizes.matrices == 1;
  // Few rows are exact where that is asked for, and leave most of a tile empty.
  return is_covered && sizes.rows > most_gemv_rows && sizes.columns > 0 && sizes.outputs > 0 && runs_kernels(stream) &&
         gpu_of(stream).has_matrix_units;
}

void check_int8_activations(const char* op, mx::Stream stream) {
  if (runs_kernels(stream) && !gpu_of(stream).has_matrix_units) {
    checks::fail(op, "activations is 'int8' on a GPU without matrix units for integers, ", gpu_of(stream).name.text(),
                 ": expected a CPU, or an Apple GPU from the M5 on with macOS 26.2; leave activations out, or give "
                 "stream=mx.cpu");
  }
}

const char* why_mx_quantized(const QuantizedKernels& kernels, const QuantizedFormat& format, mx::Dtype dtype,
                             const ProductSizes& sizes, mx::Stream stream) {
  if (!runs_kernels(stream)) {
    return nullptr;
  }
  const Gpu& gpu = gpu_of(stream);
  const bool is_many = sizes.rows > most_gemv_rows;
  const bool is_prompt = is_many && gpu.vendor == Gpu::Vendor::apple;
  const bool has_tiles = format.transpose && has_affine_kernels(format) && kernels.has_tiles;
  if (is_many && gpu.vendor == Gpu::Vendor::nvidia && (sizes.rows > most_nvidia_rows || !has_tiles)) {
    return tensor_cores;
  }
  if (!format.transpose) {
    return is_prompt ? why_mx_tiles(quantized_tiles(format, kernels.matrices), dtype, sizes, gpu) : nullptr;
  }
  if (gpu.vendor == Gpu::Vendor::nvidia) {
    // Where mx goes over to tensor cores, and ours does not (bench/results/h200.json).
    const bool wins = kernels.has_tiles && dtype == mx::float32 && uint64_t(sizes.matrices) * sizes.rows >= 12;
    return wins ? tensor_cores : nullptr;
  }
  // MLX's limits on GPUs with matrix units: its kernels for fewer rows do not use them.
  const uint32_t larger = std::max(sizes.columns, sizes.outputs);
  const uint32_t fewest = larger <= 2048 ? 33 : larger <= 4096 ? 25 : 13;
  const bool wins = sizes.rows >= fewest && sizes.columns % 64 == 0;
  if (wins && mlx_uses_matrix_units(gpu, dtype)) {
    return matrix_units;
  }
  if (!is_prompt || gpu.has_matrix_units) {
    return nullptr;
  }
  const TilesKernels tiles = quantized_tiles(format, kernels.matrices);
  const SplitTilesPlan plan = plan_split_tiles(tiles, kernels.matrices, sizes, gpu);
  const bool are_busy = has_tile_outputs(tiles, sizes) && keep_busy(tiles_of(plan, sizes) * plan.splits, gpu);
  return are_busy ? nullptr : few_tiles;
}

}  // namespace mittens
