// Which row kernel serves a shape, and its grid. The thresholds are the table below; a pack is 16 bytes of a row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "backends/launch.h"
#include "params/norm.h"
#include "runtime/array_layout.h"

namespace mittens {

enum class RowKernel { simd, block, looped, split };

struct RowVariant {
  uint32_t most_packs;  // of a row
  uint32_t most_rows;
  RowKernel kernel;
  const char* name;
  uint32_t lanes;  // threads that share a row: exactly (simd), at most (others)
  uint32_t packs;  // a thread holds at once
  uint32_t rows;  // a lane holds at once
};

inline constexpr uint32_t no_limit = std::numeric_limits<uint32_t>::max();
inline constexpr uint32_t usual_packs = 4;  // that a thread of an op's block kernels holds at most

// The first that fits is taken. Short rows: the fewest lanes that hold a row, no barriers. Middle rows: where rows are
// few, one pack a thread for the least latency; where they are many, several packs a thread, so that more loads are in
// flight and fewer simdgroups meet at the barrier, eight of them in kernels that have the registers. Long rows, past
// what the registers of 512 threads hold: a threadgroup each where there are enough of them to fill a GPU or too little
// in one to share, else several.
inline constexpr RowVariant row_variants[] = {
    {8, no_limit, RowKernel::simd, "simd8", 8, 1, 2},
    {16, no_limit, RowKernel::simd, "simd16", 16, 1, 2},
    {32, no_limit, RowKernel::simd, "simd32", 32, 1, 2},
    {64, no_limit, RowKernel::simd, "simd32x2", 32, 2, 1},
    {128, 512, RowKernel::block, "block1", 128, 1, 1},
    {128, no_limit, RowKernel::simd, "simd32x4", 32, 4, 1},
    {512, 64, RowKernel::block, "block1", 512, 1, 1},
    {512, no_limit, RowKernel::block, "block2", 512, 2, 1},
    {1024, 64, RowKernel::block, "block2", 512, 2, 1},
    {2048, 64, RowKernel::block, "block4", 512, 4, 1},
    {2048, no_limit, RowKernel::block, "block8", 512, 8, 1},
    {2048, no_limit, RowKernel::block, "block4", 512, 4, 1},
    {4096, 8, RowKernel::split, "split", 256, 2, 1},
    {4096, no_limit, RowKernel::looped, "looped", 512, 4, 1},
    {no_limit, 256, RowKernel::split, "split", 256, 2, 1},
    {no_limit, no_limit, RowKernel::looped, "looped", 512, 4, 1},
};

struct RowPlan {
  RowKernel kernel;
  const char* variant;
  RowParams params;
  uint32_t threads;  // per threadgroup
  uint32_t threadgroups;
};

// For the rows of x. Rows are split only where there is a workspace for it; a thread holds at most `held` packs.
RowPlan plan_rows(const mx::array& x, bool may_split, uint32_t held = usual_packs);

// Rows of so many packs are not split, however few they are.
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
inline bool wants_workspace(const mx::array& x) {
  constexpr int64_t fewest_elements = 4;  // of a pack, in float32
  const bool is_small = x.size() <= no_limit && x.shape(-1) <= fewest_elements * unsplit_packs;
  return !is_small && plan_rows(x, true).kernel == RowKernel::split;
}

// What the threadgroups of split rows leave for each other, in float32: `each` numbers a threadgroup; empty for other
// plans, which come up where a compiled function meets another shape.
mx::Shape workspace_shape(const mx::array& x, int each);

// A launch of "<op>_<variant>_<dtype>" on the plan's grid; its arguments are still to be given.
Launch row_launch(Name file, const char* op, const char* variant, const RowPlan& plan, mx::Dtype dtype);

// Elements between the last 16-byte boundary and the array's start.
inline uint32_t phase_of(const mx::array& array) {
  return static_cast<uint32_t>(array.offset() % 16 / array.itemsize());
}

// Whether every row of an array starts on a 16-byte boundary and fills packs.
inline bool has_whole_rows(const mx::array& array) {
  return array.shape(-1) * array.itemsize() % 16 == 0 && phase_of(array) == 0;
}

}  // namespace mittens
