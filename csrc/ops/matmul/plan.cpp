#include "ops/matmul/plan.h"

#include <algorithm>
#include <bit>

#include "params/matmul.h"
#include "runtime/array_layout.h"
#include "runtime/checks.h"
#include "runtime/fallback.h"
#include "runtime/numerics.h"
#include "runtime/plan_table.h"

namespace mittens {

namespace {

constexpr uint32_t any_rows = 0;

// A row of a table: the first that fits is taken.
template <typename Kernel>
struct Schedule {
  const char* name;
  Kernel kernel;
  Where where;
  // Rows of x from which on it pays, as measured or predicted.
  uint32_t fewest_rows_half;
  uint32_t fewest_rows_float32;
  uint32_t most_rows;
};

// On NVIDIA GPUs 8x8 matrices are the tensor cores', which take a product in float32 apart into three.
constexpr Schedule<GemvKernel> gemv_schedules[] = {
    {"short", GemvKernel::short_row, Where::nvidia, any_rows, any_rows, 1},
    {"tiles", GemvKernel::tiles, Where::nvidia, 3, 4, unlimited_rows},
    {"tiles", GemvKernel::tiles, Where::apple, 5, 5, unlimited_rows},
    {"rows", GemvKernel::rows, Where::anywhere, any_rows, any_rows, unlimited_rows},
};

// On NVIDIA GPUs matrices of floats never pay: they go through shuffles. One row is a product of matrices there, since
// tensor cores are many times faster than unpacking the weights.
constexpr Schedule<AffineKernel> affine_schedules[] = {
    {"mma_row", AffineKernel::mma_row, Where::nvidia, any_rows, unlimited_rows, 1},
    {"tiles", AffineKernel::tiles, Where::nvidia, 2, unlimited_rows, unlimited_rows},
    {"rows", AffineKernel::nvidia_rows, Where::nvidia, any_rows, any_rows, unlimited_rows},
    {"qmm_tiles", AffineKernel::qmm_tiles, Where::apple, most_gemv_rows + 1, most_gemv_rows + 1, unlimited_rows},
    {"rows", AffineKernel::rows, Where::anywhere, any_rows, any_rows, unlimited_rows},
    {"tiles", AffineKernel::matrices, Where::anywhere, any_rows, any_rows, unlimited_rows},
};

// can_run: whether a kernel can compute the problem at all.
template <typename Kernel, size_t n, typename CanRun>
Kernel choose(const Schedule<Kernel> (&table)[n], const Gpu& gpu, mx::Dtype dtype, uint32_t rows, const Name& asked_for,
              CanRun can_run) {
  const auto can_run_here = [&](const Schedule<Kernel>& schedule) {
    return is_here(schedule.where, gpu) && can_run(schedule.kernel);
  };
  const auto pays = [&](const Schedule<Kernel>& schedule) {
    const uint32_t fewest = dtype == mx::float32 ? schedule.fewest_rows_float32 : schedule.fewest_rows_half;
    return rows >= fewest && rows <= schedule.most_rows;
  };
  return choose_row(table, asked_for, can_run_here, pays).kernel;
}

// The number of simdgroups to launch: several times as many as the cores hold.
uint32_t wanted_simdgroups(const Gpu& gpu) {
  return 31 * gpu.cores;
}

// --- simdgroups of a threadgroup

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

// Packed weights: matmul/nvidia/qmv.metal and matmul/nvidia/quantized_swiglu.metal. chunks: of columns, each taken by a
// simdgroup at once. outputs: of all matrices and blocks of rows. products: of a simdgroup for each output.
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

// Products by 8x8 matrices: matmul/gemv_tiles.metal and matmul/nvidia/qmm.metal. Simdgroups of a threadgroup, `fewest`
// to `most`, that are through with their chunks of columns in the fewest rounds. Threadgroups that find no room on any
// core start when others end, and take as long again: the rounds of all these waves count. Of several numbers it is the
// smallest, since each simdgroup takes time to start.
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

// --- dense weights

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

// --- products by rows

// Of matmul/qmv.metal and matmul/quantized_swiglu.metal; most of matmul/gguf_matmul.metal take less.
Registers rows_registers(uint32_t rows) {
  return rows == 1 ? Registers{139, 128} : rows == 2 ? Registers{193, 128} : Registers{211, 128};
}

// --- weights [columns, outputs]

uint32_t lanes_along(uint32_t outputs, uint32_t owned) {
  return std::min(std::bit_ceil(std::max(ceil_divide(outputs, owned), 1u)), 32u);
}

// --- affine weights

// Of matmul/qmm.metal.
constexpr Registers matrices_registers{183, 128};

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

// Whether there are as many outputs as a simdgroup of matmul/apple/qmm_tiles.h has.
bool has_tile_outputs(const TilesKernels& kernels, const ProductSizes& sizes) {
  return sizes.outputs >= kernels.outputs_32 / kTileSimdgroups;
}

// Of matmul/nvidia/qmm.metal.
Registers tiles_registers(const AffineFormat& format, uint32_t rows, uint32_t run) {
  const uint32_t most = run == 32 ? (format.bits == 4 ? 128 : 80) : format.bits == 4 ? 168 : rows <= 8 ? 96 : 128;
  return {255, most};
}

void plan_affine_nvidia_rows(AffinePlan& plan, const AffineKernels& kernels, const AffineFormat& format,
                             const ProductSizes& sizes, const Gpu& gpu) {
  const uint32_t together = std::min(std::bit_ceil(std::max(sizes.rows, 1u)), kernels.most_rows);
  const uint32_t lane_columns = lane_words(format.bits, static_cast<int>(together)) * 32 / format.bits;
  const uint32_t chunks = ceil_divide(sizes.columns, 32 * lane_columns);
  const uint64_t each = uint64_t(sizes.outputs) * sizes.matrices * ceil_divide(sizes.rows, together);
  const Registers registers{255, together > 2 ? 255u : 128u};
  static_cast<RowProductsPlan&>(plan) = plan_row_products(chunks, each, together * kernels.matrices, registers, gpu);
  plan.rows = together;
}

void plan_affine_mma_row(AffinePlan& plan, const AffineKernels& kernels, const ProductSizes& sizes, const Gpu& gpu) {
  constexpr uint32_t products = 8 * kRowBlocks;  // of a simdgroup
  const uint32_t resident_simdgroups = gpu.cores * gpu.resident_simdgroups({207, 128});
  plan.rows = 1;
  plan.outputs_per_group = products / kernels.matrices;
  const uint32_t groups = ceil_divide(std::max(sizes.outputs, 1u), plan.outputs_per_group) * sizes.matrices;
  const uint32_t chunks = ceil_divide(sizes.columns, kRowStep);
  const uint32_t wanted = std::min({std::max(resident_simdgroups / groups, 2u), chunks, uint32_t(kRowSimdgroups)});
  plan.simdgroups = ceil_divide(chunks, ceil_divide(chunks, wanted));  // none has a round less than another needs
}

void plan_affine_tiles(AffinePlan& plan, const AffineFormat& format, const ProductSizes& sizes, const Gpu& gpu) {
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

uint64_t tiles_of(const TilesPlan& plan, const ProductSizes& sizes) {
  return uint64_t(plan.row_blocks) * plan.output_groups * sizes.matrices;
}

// Whether tiles occupy four fifths of the cores until the last one ends: mx splits columns where outputs are few, and
// takes a fifth longer otherwise (bench/results/prompts.md).
bool keep_busy(uint64_t tiles, const Gpu& gpu) {
  const uint64_t rounds = ceil_divide(tiles, gpu.cores);
  const bool hides_latencies = tiles * 2 >= uint64_t(gpu.cores) * 3;  // one tile alone on a core does not
  return hides_latencies && tiles * 5 >= rounds * gpu.cores * 4;
}

bool keep_busy(const TilesKernels& kernels, const ProductSizes& sizes, const Gpu& gpu) {
  return has_tile_outputs(kernels, sizes) && keep_busy(tiles_of(plan_tiles(kernels, sizes), sizes), gpu);
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

const Schedules of_gemv({"gemv"}, gemv_schedules);
const Schedules of_affine({"quantized_matmul", "quantized_swiglu"}, affine_schedules);

// Up to these many rows NVIDIA's tiles of 16 rows take less time than mx's product (bench/results/h200-batches.json).
constexpr uint32_t most_nvidia_rows = 64;

constexpr const char* tensor_cores = "many rows of x where there are tensor cores";
constexpr const char* few_tiles = "too few outputs for many rows of x to keep a GPU busy";
constexpr const char* matrix_units = "many rows of x where there are matrix units";

// Of more rows than kernels of few rows take, on an Apple GPU.
const char* why_mx_tiles(const TilesKernels& kernels, mx::Dtype dtype, const ProductSizes& sizes, const Gpu& gpu) {
  if (mlx_uses_matrix_units(gpu, dtype)) {
    return matrix_units;
  }
  return keep_busy(kernels, sizes, gpu) ? nullptr : few_tiles;
}

// --- weights of GGUF files

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

Problem product_problem(const char* op, mx::Dtype dtype, uint32_t format, const ProductSizes& sizes) {
  return {op, dtype, format, {sizes.matrices, sizes.rows, sizes.columns, sizes.outputs}};
}

uint32_t affine_number(const AffineFormat& format) {
  return ((static_cast<uint32_t>(format.mode) * 10 + format.bits) * 1000 + format.group_size) * 2 + format.transpose;
}

namespace {

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

TilesKernels affine_tiles(const AffineFormat& format, uint32_t matrices) {
  const bool has_64 = has_affine_kernels(format) || !format.has_biases();
  const uint32_t outputs_32 = format.transpose ? kTileOutputs / matrices : 2 * kTileOutputs;
  return {outputs_32, has_64 ? kTileOutputs / matrices : 0};
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

ColumnsPlan plan_columns(const Problem& problem, const ProductSizes& sizes, const ColumnsKernels& kernels,
                         uint32_t most_splits, mx::Stream stream) {
  constexpr uint32_t fewest_steps = 4;  // rows of weights for each worker of a split
  const Gpu gpu = gpu_of(stream).with_parallelism(calibrated(problem, stream).parallelism);
  ColumnsPlan plan;
  plan.rows = std::min(std::bit_ceil(std::max(sizes.rows, 1u)), kernels.most_rows);
  plan.row_blocks = ceil_divide(sizes.rows, plan.rows);
  plan.lanes = lanes_along(sizes.outputs, kernels.owned);
  plan.tiles = ceil_divide(sizes.outputs, plan.lanes * kernels.owned);
  plan.threads = 32 * kOutputSimdgroups;

  const uint32_t lanes = lanes_along(sizes.outputs, kernels.most_owned);
  const uint64_t threadgroups =
      uint64_t(ceil_divide(sizes.outputs, lanes * kernels.most_owned)) * plan.row_blocks * sizes.matrices;
  const uint32_t worthwhile = sizes.columns / (kOutputSimdgroups * (32 / lanes) * fewest_steps);
  const uint32_t wanted = ceil_divide(wanted_simdgroups(gpu) / kOutputSimdgroups, std::max<uint64_t>(threadgroups, 1));
  const uint32_t splits = std::clamp(worthwhile, 1u, std::min(std::max(wanted, 1u), most_splits));
  plan.columns_per_split = ceil_divide(std::max(sizes.columns, 1u), splits);
  plan.splits = ceil_divide(std::max(sizes.columns, 1u), plan.columns_per_split);
  return plan;
}

QvmPlan plan_qvm(const Problem& problem, const AffineFormat& format, const ProductSizes& sizes, uint32_t most_splits,
                 mx::Stream stream) {
  QvmPlan plan{};
  const bool is_nvidia = gpu_of(stream).vendor == Gpu::Vendor::nvidia;
  if (is_nvidia && has_affine_kernels(format)) {
    plan.kernel = QvmKernel::columns;
    plan.columns = plan_columns(problem, sizes, {kOwnedOutputs, kOwnedOutputs, kMatrixRows}, most_splits, stream);
    static_cast<Splits&>(plan) = plan.columns;
    return plan;
  }
  if (!is_nvidia && sizes.rows > most_gemv_rows) {
    plan.kernel = QvmKernel::tiles;
    plan.by_tiles = plan_tiles(affine_tiles(format, 1), sizes);
    plan.splits = 1;
    plan.columns_per_split = sizes.columns;
    return plan;
  }
  plan.kernel = QvmKernel::matrices;
  constexpr uint32_t step = kTransposedStep;
  constexpr uint32_t most_blocks = 4;  // of 4 bits, a line of memory
  constexpr uint32_t fewest_steps = 4;  // of a simdgroup
  const Gpu gpu = gpu_of(stream).with_parallelism(calibrated(problem, stream).parallelism);
  const uint32_t output_blocks = ceil_divide(std::max(sizes.outputs, 1u), uint32_t(kTransposedOutputs));
  const uint32_t steps = ceil_divide(std::max(sizes.columns, 1u), step);
  plan.row_blocks = ceil_divide(sizes.rows, uint32_t(kMatrixRows));
  plan.blocks = std::min(output_blocks, most_blocks);
  plan.output_groups = ceil_divide(output_blocks, plan.blocks);
  plan.sharers = std::min(kProductSimdgroups / plan.blocks, steps);
  const uint64_t simdgroups =
      uint64_t(plan.output_groups) * plan.blocks * plan.sharers * std::max(plan.row_blocks, 1u) * sizes.matrices;
  const uint64_t resident_simdgroups = uint64_t(gpu.cores) * gpu.resident_simdgroups(matrices_registers);
  const uint32_t wanted = ceil_divide(resident_simdgroups, std::max(simdgroups, uint64_t(1)));
  const uint32_t worthwhile = std::max(steps / (plan.sharers * fewest_steps), 1u);
  const uint32_t steps_per_split = ceil_divide(steps, std::min({wanted, worthwhile, most_splits}));
  plan.columns_per_split = steps_per_split * step;
  plan.splits = ceil_divide(steps, steps_per_split);
  return plan;
}

namespace {

// The outputs that simdgroups of matmul/qmv.metal and matmul/quantized_swiglu.metal have.
void give_outputs(RowsPlan& plan, const AffineKernels& kernels, mx::Dtype dtype, const ProductSizes& sizes) {
  const int all = row_outputs(static_cast<int>(plan.rows), static_cast<int>(mx::size_of(dtype)));
  const uint32_t outputs = all / kernels.matrices;
  plan.output_blocks = sizes.outputs < outputs ? sizes.outputs : ceil_divide(sizes.outputs, outputs);
}

}  // namespace

AffinePlan plan_affine(const AffineKernels& kernels, const AffineFormat& format, mx::Dtype dtype,
                       const ProductSizes& sizes, mx::Stream stream) {
  const Choice choice = calibrated(product_problem(kernels.op, dtype, affine_number(format), sizes), stream);
  const Gpu gpu = gpu_of(stream).with_parallelism(choice.parallelism);
  const bool all = has_affine_kernels(format);
  const uint32_t most_rows = all ? 4 : 1;  // of x in the kernel by rows, which rare formats have for one
  AffinePlan plan{};
  plan.kernel = choose(affine_schedules, gpu, dtype, sizes.rows, choice.schedule, [&](AffineKernel kernel) {
    switch (kernel) {
      case AffineKernel::mma_row:
        return all && sizes.rows == 1 && dtype != mx::float32 && format.bits == 4 && format.group_size >= 64;
      case AffineKernel::tiles:
        return all && kernels.has_tiles && dtype != mx::float32;
      case AffineKernel::nvidia_rows:
        return all && (!kernels.has_tiles || dtype == mx::float32 || sizes.rows <= 1);
      case AffineKernel::qmm_tiles:
        return kernels.has_qmm_tiles && has_tile_outputs(affine_tiles(format, kernels.matrices), sizes);
      case AffineKernel::matrices:
        return true;
      case AffineKernel::rows:
        return sizes.rows <= most_rows;
    }
    return false;
  });
  switch (plan.kernel) {
    case AffineKernel::mma_row:
      plan_affine_mma_row(plan, kernels, sizes, gpu);
      break;
    case AffineKernel::tiles:
      plan_affine_tiles(plan, format, sizes, gpu);
      break;
    case AffineKernel::nvidia_rows:
      plan_affine_nvidia_rows(plan, kernels, format, sizes, gpu);
      break;
    case AffineKernel::qmm_tiles:
      plan.by_tiles = plan_split_tiles(affine_tiles(format, kernels.matrices), kernels.matrices, sizes, gpu);
      break;
    case AffineKernel::matrices:
      plan.by_matrices = plan_matrices(sizes, kMatrixOutputs / kernels.matrices, gpu);
      break;
    case AffineKernel::rows:
      plan.shared = plan_rows(sizes, kRowOutputs / kernels.matrices, gpu, most_rows);
      give_outputs(plan.shared, kernels, dtype, sizes);
      break;
  }
  return plan;
}

AffinePlan plan_affine_exact(const AffineKernels& kernels, const AffineFormat& format, mx::Dtype dtype,
                             const ProductSizes& sizes, mx::Stream stream) {
  constexpr uint32_t tile_rows = 8;
  const Gpu& gpu = gpu_of(stream);
  AffinePlan plan{};
  if (gpu.vendor == Gpu::Vendor::nvidia && has_affine_kernels(format)) {
    const bool has_tiles = kernels.has_tiles && dtype != mx::float32;
    plan.kernel = has_tiles ? AffineKernel::tiles : AffineKernel::nvidia_rows;
    if (has_tiles) {
      plan_affine_tiles(plan, format, {1, tile_rows, sizes.columns, sizes.outputs}, gpu);
    } else {
      plan_affine_nvidia_rows(plan, kernels, format, {1, 1, sizes.columns, sizes.outputs}, gpu);
    }
    return plan;
  }
  // Sharers as of one row; the rows and outputs of a simdgroup change no sum.
  plan.kernel = AffineKernel::rows;
  plan.shared = plan_rows({1, 1, sizes.columns, sizes.outputs}, kRowOutputs / kernels.matrices, gpu, 1);
  if (has_common_kernels(format) && gpu.vendor == Gpu::Vendor::apple) {
    plan.shared.rows = std::min(std::bit_ceil(std::max(sizes.rows, 1u)), uint32_t(kMostExactRows));
  }
  plan.shared.row_blocks = ceil_divide(sizes.rows, plan.shared.rows);
  give_outputs(plan.shared, kernels, dtype, sizes);
  return plan;
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

uint32_t most_affine_rows(const AffineKernels& kernels, mx::Stream stream) {
  if (stream.device != mx::Device::gpu) {
    return unlimited_rows;
  }
  if (gpu_of(stream).vendor == Gpu::Vendor::apple) {
    return kernels.has_qmm_tiles ? unlimited_rows : most_gemv_rows;
  }
  return kernels.has_tiles ? most_nvidia_rows : most_gemv_rows;
}

bool multiplies_int8(const AffineFormat& format, const ProductSizes& sizes, mx::Stream stream) {
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

const char* why_mx_affine(const AffineKernels& kernels, const AffineFormat& format, mx::Dtype dtype,
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
    return is_prompt ? why_mx_tiles(affine_tiles(format, kernels.matrices), dtype, sizes, gpu) : nullptr;
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
  const TilesKernels tiles = affine_tiles(format, kernels.matrices);
  const SplitTilesPlan plan = plan_split_tiles(tiles, kernels.matrices, sizes, gpu);
  const bool are_busy = has_tile_outputs(tiles, sizes) && keep_busy(tiles_of(plan, sizes) * plan.splits, gpu);
  return are_busy ? nullptr : few_tiles;
}

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
