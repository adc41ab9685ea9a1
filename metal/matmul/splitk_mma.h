// Sums of simdgroups that share out the columns of a product by matrices: each leaves its tile in threadgroup memory,
// and the threads add them up, always in the same order.
#pragma once

#include "mittens/tile.h"
#include "params/matmul.h"

namespace mittens {

// R blocks of 8 outputs times C blocks of 8 rows of x.
template <int R, int C>
struct TilePartials {
  static constant constexpr int outputs = R * 8;
  static constant constexpr int rows = C * 8;
  static constant constexpr int row = outputs + 4;  // so far apart that no two banks meet
  static constant constexpr int all = kProductSimdgroups * rows * row;
};

// A lane's sums are of outputs by rows of x; in memory outputs are neighbours. output: which of a block of 8 the lane's
// row stands for.
template <int R, int C>
inline void leave_sums(
    thread const Tile<float, R, C>& sums, threadgroup float* partials, uint simdgroup, uint output, uint lane) {
  using Partials = TilePartials<R, C>;
#pragma unroll
  for (int c = 0; c < C; ++c) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint m = simdgroup * Partials::rows + c * 8 + tile_column(lane) + i;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        partials[m * Partials::row + r * 8 + output] = sums.at[r][c][i];
      }
    }
  }
}

// The sum of all simdgroups for output n and row m. Unrolled over as many simdgroups as there can be, so that the loads
// of all that are there are on their way at once.
template <typename Partials>
inline float left_sum(const threadgroup float* partials, uint n, uint m, uint simdgroups) {
  float sum = 0;
#pragma unroll
  for (uint s = 0; s < kProductSimdgroups; ++s) {
    sum += s < simdgroups ? partials[(s * Partials::rows + m) * Partials::row + n] : 0.0f;
  }
  return sum;
}

}  // namespace mittens
