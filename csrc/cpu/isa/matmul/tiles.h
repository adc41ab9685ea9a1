// Tiles of sums in registers, along a panel of weights in float32. No source of weights is known here, so that each
// tile is compiled once, in tiles.cpp.
#pragma once

#include "cpu/isa/matmul/products.h"

namespace mittens::cpu::MITTENS_ISA {

constexpr int fewest_tile_rows = 4;  // of tile_rows
constexpr int tile_vectors = many_registers ? 4 : 2;  // of outputs that lie along the lanes

// Sums along the lanes; chained: with totals.
template <int rows, int outputs, bool chained>
struct LaneSums {
  Float v[rows][outputs] = {};
  Float totals[rows][outputs] = {};
  template <int m>
  MITTENS_INLINE const Float (&of_row() const)[outputs] {
    return totals[m];
  }
  MITTENS_INLINE void end_chains() {
    repeat<rows>([&](auto m) MITTENS_INLINED {
      repeat<outputs>([&](auto i) MITTENS_INLINED {
        totals[m.value][i.value] = totals[m.value][i.value] + v[m.value][i.value];
        v[m.value][i.value] = Float{};
      });
    });
  }
};
template <int rows, int outputs>
struct LaneSums<rows, outputs, false> {
  Float v[rows][outputs] = {};
  template <int m>
  MITTENS_INLINE const Float (&of_row() const)[outputs] {
    return v[m];
  }
  MITTENS_INLINE void end_chains() {}
};

// sums[m * stride + i], i < tile_outputs: row m of x times row i of w, `length` columns of both, added to the sums or
// written to them. chain: additions to a sum. rows: fewest_tile_rows to tile_rows.
template <int rows>
void row_tile(const float* x, size_t x_stride, const float* w, size_t length, float* sums, size_t stride, bool add,
              size_t chain);

// sums[m * stride ..], tile_vectors vectors: row m of x times `length` rows of w.
template <int rows>
void column_tile(const float* x, size_t columns, const float* w, size_t length, float* sums, size_t stride, bool add);

}  // namespace mittens::cpu::MITTENS_ISA
