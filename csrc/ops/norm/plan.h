// Which row kernel serves a shape on a GPU, and its grid. The thresholds are the table below; a pack is 16 bytes of a
// row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "backends/launch.h"
#include "ops/norm/norm_vjp.h"
#include "params/norm.h"
#include "runtime/array_layout.h"
#include "runtime/calibration.h"
#include "runtime/gpu.h"
#include "runtime/plan_table.h"

namespace mittens {

enum class RowKernel { simd, block, looped, split };

struct RowVariant {
  uint32_t most_packs;  // of a row
  double most_rows;  // for each core of the GPU
  RowKernel kernel;
  const char* name;
  uint32_t lanes;  // threads that share a row: exactly (simd), at most (others)
  uint32_t packs;  // a thread holds at once, at most
  Where where = Where::anywhere;
};

inline constexpr uint32_t no_limit = std::numeric_limits<uint32_t>::max();
inline constexpr uint32_t usual_packs = 4;  // that a thread of an op's block kernels holds at most

// The first that fits is taken. Short rows: the fewest lanes that hold a row, no barriers. Middle rows: where rows are
// few, one pack a thread for the least latency; where they are many, several packs a thread, so that more loads are in
// flight and fewer simdgroups meet at the barrier, eight of them in kernels that have the registers. Long rows, which
// the registers of 512 threads do not hold: a threadgroup each where there are enough of them to fill a GPU or too
// little in one to share, else several. These read the row once more, in a second launch, which pays on an Apple GPU
// for few rows of more than 128 KB (bench/results/rows.md).
// clang-format off
inline constexpr RowVariant row_variants[] = {
    {8, no_limit, RowKernel::simd, "simd8", 8, 1},
    {16, no_limit, RowKernel::simd, "simd16", 16, 1},
    {32, no_limit, RowKernel::simd, "simd32", 32, 1},
    {64, no_limit, RowKernel::simd, "simd32x2", 32, 2},
    {128, 4, RowKernel::block, "block1", 128, 1},
    {128, no_limit, RowKernel::simd, "simd32x4", 32, 4},
    {512, 0.5, RowKernel::block, "block1", 512, 1},
    {512, no_limit, RowKernel::block, "block2", 512, 2},
    {1024, 0.5, RowKernel::block, "block2", 512, 2},
    {2048, 0.5, RowKernel::block, "block4", 512, 4},
    {2048, no_limit, RowKernel::block, "block8", 512, 8},
    {2048, no_limit, RowKernel::block, "block4", 512, 4},
    {4096, 0.0625, RowKernel::split, "split", 256, 2, Where::nvidia},
    {4096, no_limit, RowKernel::looped, "looped", 512, 4},
    {8192, no_limit, RowKernel::looped, "looped", 512, 4, Where::apple},
    {no_limit, 0.125, RowKernel::split, "split", 256, 2, Where::apple},
    {no_limit, 2, RowKernel::split, "split", 256, 2, Where::nvidia},
    {no_limit, no_limit, RowKernel::looped, "looped", 512, 4},
};
// clang-format on

struct RowPlan {
  RowKernel kernel;
  const char* variant;
  RowParams params;
  uint32_t threads;  // per threadgroup
  uint32_t threadgroups;
};

// The inputs of a plan beside the rows.
struct RowPlanOptions {
  const char* op;
  uint32_t most_splits = no_limit;  // of a row, as a workspace has room for; 1 where there is none
  uint32_t most_packs = usual_packs;  // that a thread holds
};

// For the rows of x, on a stream's GPU.
RowPlan plan_row_op(const mx::array& x, mx::Stream stream, const RowPlanOptions& options);

// The problem for calibration of an op on the rows of x.
Problem row_problem(const char* op, const mx::array& x, mx::Dtype dtype);

// Rows of at most this many packs are not split, however few rows there are.
inline constexpr uint32_t unsplit_packs = [] {
  uint32_t packs = 0;
  for (const auto& variant : row_variants) {
    if (variant.kernel == RowKernel::split) {
      break;
    }
    packs = variant.most_rows == no_limit && variant.packs <= usual_packs ? variant.most_packs : packs;
  }
  return packs;
}();

// Whether a primitive on x should bring a workspace: a second output, which costs MLX the donation of x to the first.
// Mostly that takes no plan: this is on the path of every call.
inline bool wants_workspace(const mx::array& x, mx::Stream stream, const RowPlanOptions& options) {
  constexpr int64_t fewest_elements = 4;  // of a pack, in float32
  const bool is_small = x.size() <= no_limit && x.shape(-1) <= fewest_elements * unsplit_packs;
  return !is_small && plan_row_op(x, stream, options).kernel == RowKernel::split;
}

// The shape of the results that threadgroups of split rows exchange, in float32: `each` numbers a threadgroup; empty
// for other plans, which come up where a compiled function meets another shape.
mx::Shape workspace_shape(const RowPlan& plan, int each);

// How many threadgroups a workspace has room for a row, 1 where it is empty.
uint32_t splits_of_workspace(const mx::array& workspace);

// A launch of "<op>_<kind><variant>_<dtype>" on the plan's grid; its arguments are still to be given.
Launch row_launch(Name file, const char* op, const char* kind, const char* variant, const RowPlan& plan,
                  mx::Dtype dtype);

enum class NormVjpKernel { simd, block, columns };

struct NormVjpVariant {
  uint32_t most_packs;  // of a row
  uint32_t least_itemsize;  // a pack of small elements takes more registers: its sums are float32
  NormVjpKernel kernel;
  const char* name;
  uint32_t packs;  // a thread holds at once
};

// Depends on the shape only, so that the order of the sums does.
struct NormVjpPlan {
  const NormVjpVariant* variant;
  uint32_t rows;
  uint32_t columns;
  uint32_t threads;
  uint32_t blocks;
  uint32_t splits;
  uint32_t packs_per_split;
};

inline constexpr uint32_t norm_vjp_simdgroups = 8;  // in a threadgroup of the simd and column kernels

NormVjpPlan plan_norm_vjp(const mx::array& x, const NormVjpOptions& options);

// Whether every row of an array starts on a 16-byte boundary and fills packs.
inline bool has_whole_rows(const mx::array& array) {
  return array.shape(-1) * array.itemsize() % 16 == 0 && phase_of(array) == 0;
}

}  // namespace mittens
