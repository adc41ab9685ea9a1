// Tiles that are loaded by whole vectors of neighbours: columns meet by pairs (mittens/tile.h), and columns of b are dealt
// out to W matrices in the same way, in which sums are stored. A block is the 8 * W columns that W matrices hold.
#pragma once

#include "mittens/tile.h"

namespace mittens {

// Elements of the vectors by which N neighbours are moved.
template <typename T, int N>
constexpr int vector_size() {
  return N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
}

template <typename T, int N>
inline void store_neighbours(device T* p, thread const float (&v)[N]) {
  constexpr int part = vector_size<T, N>();
#pragma unroll
  for (int i = 0; i < N; i += part) {
    if constexpr (part * sizeof(T) == 16) {
      uint4 bits = uint4(0);
#pragma unroll
      for (int j = 0; j < part; ++j) {
        if constexpr (sizeof(T) == 4) {
          bits[j] = as_type<uint>(v[i + j]);
        } else {
          bits[j / 2] |= uint(as_type<ushort>(T(v[i + j]))) << (16 * (j % 2));
        }
      }
      *(device uint4*)(p + i) = bits;
    } else {
#pragma unroll
      for (int j = 0; j < part; ++j) {
        p[i + j] = T(v[i + j]);
      }
    }
  }
}

// Sums of matrices whose columns 2 j and 2 j + 1 of matrix t are elements j * 2 W + 2 t and the next of a block.
template <typename T, int W>
inline void store_dealt_pairs(thread const Tile<float, 1, W>& from, device T* row, uint lane) {
  float v[2 * W];
#pragma unroll
  for (int t = 0; t < W; ++t) {
    v[2 * t] = from.at[0][t].x;
    v[2 * t + 1] = from.at[0][t].y;
  }
  store_neighbours<T, 2 * W>(row + tile_column(lane) * W, v);
}

}  // namespace mittens
