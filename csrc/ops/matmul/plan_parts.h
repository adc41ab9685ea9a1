// Parts of plans of products: tables of kernels, threadgroups that fill a GPU, and reasons for mx.
#pragma once

#include <cstddef>

#include "ops/matmul/plan.h"
#include "runtime/plan_table.h"

namespace mittens {

inline constexpr uint32_t any_rows = 0;

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
uint32_t wanted_simdgroups(const Gpu& gpu);

// Packed weights: matmul/nvidia/rows.metal and matmul/nvidia/quantized_swiglu.metal. chunks: of columns, each taken by
// a simdgroup at once. outputs: of all matrices and blocks of rows. products: of a simdgroup for each output.
RowProductsPlan plan_row_products(uint32_t chunks, uint64_t outputs, uint32_t products, Registers registers,
                                  const Gpu& gpu);

// Products by 8x8 matrices: matmul/gemv_tiles.metal and matmul/nvidia/tiles.metal. Simdgroups of a threadgroup,
// `fewest` to `most`, that are through with their chunks of columns in the fewest rounds. Threadgroups that find no
// room on any core start when others end, and take as long again: the rounds of all these waves count. Of several
// numbers it is the smallest, since each simdgroup takes time to start.
uint32_t plan_tile_simdgroups(uint64_t threadgroups, uint32_t chunks, Registers registers, uint32_t fewest,
                              uint32_t most, const Gpu& gpu);

// Of matmul/qmm.metal.
inline constexpr Registers matrices_registers{183, 128};

// Whether there are as many outputs as a simdgroup of matmul/apple/qmm_tiles.h has.
bool has_tile_outputs(const TilesKernels& kernels, const ProductSizes& sizes);

uint64_t tiles_of(const TilesPlan& plan, const ProductSizes& sizes);

// Whether tiles occupy four fifths of the cores until the last one ends: mx splits columns where outputs are few, and
// takes a fifth longer otherwise (bench/results/prompts.md).
bool keep_busy(uint64_t tiles, const Gpu& gpu);
bool keep_busy(const TilesKernels& kernels, const ProductSizes& sizes, const Gpu& gpu);

inline constexpr const char* tensor_cores = "many rows of x where there are tensor cores";
inline constexpr const char* few_tiles = "too few outputs for many rows of x to keep a GPU busy";
inline constexpr const char* matrix_units = "many rows of x where there are matrix units";

// Of more rows than kernels of few rows take, on an Apple GPU.
const char* why_mx_tiles(const TilesKernels& kernels, mx::Dtype dtype, const ProductSizes& sizes, const Gpu& gpu);

}  // namespace mittens
