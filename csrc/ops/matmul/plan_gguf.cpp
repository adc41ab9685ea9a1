// Plans of products with GGUF blocks.
#include "ops/matmul/plan_parts.h"

#include <algorithm>

#include "params/matmul.h"
#include "runtime/array_layout.h"
#include "runtime/fallback.h"

namespace mittens {

namespace {

// Kinds that most files have.
bool is_common(cpu::BlockKind kind) {
  switch (kind) {
    case cpu::BlockKind::q4_0:
    case cpu::BlockKind::q8_0:
    case cpu::BlockKind::q4_k:
    case cpu::BlockKind::q5_k:
    case cpu::BlockKind::q6_k:
      return true;
    default:
      return false;
  }
}

// On M1 and M2 tiles of 32 rows, of kinds that are not common, are a fifth behind mx's products of dense half types,
// so that dequantizing weights pays beyond this number of rows (bench/results/prompts.md).
constexpr uint32_t most_unpacked_rows = 192;
constexpr const char* dequantized_win = "more rows of x than weights take to be dequantized";

// matmul/apple/gguf_tiles.metal.
TilesKernels gguf_tiles(cpu::BlockKind kind) {
  constexpr uint32_t outputs = kTileOutputs;
  return {outputs, is_common(kind) ? outputs : 0};
}

}  // namespace

GgufPlan plan_gguf(const Problem& problem, cpu::BlockKind kind, const ProductSizes& sizes, bool exact,
                   mx::Stream stream) {
  constexpr uint32_t most_rows = 4;  // of the kinds that most files have; the others' kernels take one
  const Gpu gpu = gpu_of(stream).with_parallelism(calibrated(problem, stream).parallelism);
  GgufPlan plan{};
  if (exact) {  // sharers as of one row
    plan.rows = plan_rows({1, 1, sizes.columns, sizes.outputs}, kRowOutputs, gpu, 1);
    plan.rows.rows = is_common(kind) && sizes.rows > 1 ? most_rows : 1;
    plan.rows.row_blocks = ceil_divide(sizes.rows, plan.rows.rows);
    return plan;
  }
  // Tiles count bytes of blocks in 32 bits.
  const uint64_t bytes = uint64_t(sizes.columns) / cpu::block_weights(kind) * cpu::block_bytes(kind) * sizes.outputs;
  plan.is_by_tiles = gpu.vendor == Gpu::Vendor::apple && sizes.rows > most_gemv_rows &&
                     has_tile_outputs(gguf_tiles(kind), sizes) && bytes < uint64_t(1) << 32;
  if (plan.is_by_tiles) {
    plan.tiles = plan_tiles(gguf_tiles(kind), sizes);
    return plan;
  }
  ProductSizes planned = sizes;
  planned.rows = sizes.rows > 1 ? std::max(sizes.rows, most_rows) : 1;
  plan.rows = is_common(kind) ? plan_rows(planned, kRowOutputs, gpu, most_rows) : plan_rows(sizes, kRowOutputs, gpu, 1);
  return plan;
}

uint32_t most_gguf_rows(mx::Stream stream) {
  const bool is_nvidia = stream.device == mx::Device::gpu && gpu_of(stream).vendor == Gpu::Vendor::nvidia;
  return is_nvidia ? most_gemv_rows : unlimited_rows;
}

const char* why_mx_gguf(cpu::BlockKind kind, mx::Dtype dtype, const ProductSizes& sizes, mx::Stream stream) {
  const bool is_prompt = runs_kernels(stream) && sizes.rows > most_gemv_rows;
  if (!is_prompt || gpu_of(stream).vendor != Gpu::Vendor::apple) {
    return nullptr;
  }
  const Gpu& gpu = gpu_of(stream);
  const bool is_behind = !gpu.caches_registers && dtype != mx::bfloat16 && !is_common(kind);
  return is_behind && sizes.rows > most_unpacked_rows ? dequantized_win
                                                      : why_mx_tiles(gguf_tiles(kind), dtype, sizes, gpu);
}

}  // namespace mittens
