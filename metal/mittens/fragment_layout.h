// Tiles that are loaded by whole vectors of neighbours. Which columns of a and rows of b meet in a product is free as
// long as both agree, and so is the order of the columns of b as long as sums are stored in it: so columns are dealt
// out to W matrices such that what a lane needs lies side by side. A block is the 8 * W columns that W matrices hold.
#pragma once

#include "mittens/tile.h"

namespace mittens {

// The largest W up to `most` whose blocks fill `columns`.
constexpr int dealt_width(int columns, int most) {
  return columns % (8 * most) == 0 ? most : dealt_width(columns, most / 2);
}

// The lane's elements of N matrices.
template <typename T, int N>
struct Fragments {
  vec<T, 2> at[N];
};

// Elements of the vectors by which N neighbours are moved.
template <typename T, int N>
constexpr int vector_size() {
  return N * sizeof(T) > 16 ? 16 / sizeof(T) : N;
}

// N neighbours at p, by vectors if they are `aligned` to them.
template <typename T, int N>
inline void load_neighbours(const device T* p, bool aligned, thread T (&v)[N]) {
  constexpr int part = vector_size<T, N>();
  if (part == 1 || !aligned) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = p[i];
    }
  } else if constexpr (part * sizeof(T) == 16) {
#pragma unroll
    for (int i = 0; i < N; i += part) {
      const uint4 bits = *(const device uint4*)(p + i);
#pragma unroll
      for (int j = 0; j < part; ++j) {
        if constexpr (sizeof(T) == 4) {
          v[i + j] = as_type<T>(bits[j]);
        } else {
          v[i + j] = as_type<T>(ushort(bits[j / 2] >> (16 * (j % 2)) & 0xffffu));
        }
      }
    }
  } else if constexpr (part > 1) {
    const vec<T, part> some = *(const device vec<T, part>*)p;
#pragma unroll
    for (int j = 0; j < part; ++j) {
      v[j] = some[j];
    }
  }
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

// Matrix t of a block has its column j from element j * W + t: left operands, of 8 rows. `row` points at the lane's
// row.
template <typename T, int W, int B>
inline void load_dealt_left(thread Fragments<T, B * W>& to, const device T* row, bool aligned, uint lane) {
#pragma unroll
  for (int b = 0; b < B; ++b) {
    T v[2 * W];
    load_neighbours<T, 2 * W>(row + b * 8 * W + tile_column(lane) * W, aligned, v);
#pragma unroll
    for (int t = 0; t < W; ++t) {
      to.at[b * W + t] = vec<T, 2>(v[t], v[W + t]);
    }
  }
}

// The transposed of such matrices of one block: right operands. The rows are those of the lane's two columns.
template <typename T, int W>
inline void load_dealt_right(
    thread Fragments<T, W>& to, const device T* row, const device T* next, bool aligned, uint lane) {
  T v[W];
  T w[W];
  load_neighbours<T, W>(row + tile_row(lane) * W, aligned, v);
  load_neighbours<T, W>(next + tile_row(lane) * W, aligned, w);
#pragma unroll
  for (int t = 0; t < W; ++t) {
    to.at[t] = vec<T, 2>(v[t], w[t]);
  }
}

// Matrix t of a block has its columns 2 j and 2 j + 1 from elements j * 2 W + 2 t and the next: right operands, and
// sums. Zeros where the row is not there.
template <typename T, int W>
inline void load_dealt_pairs(thread Fragments<T, W>& to, const device T* row, bool inside, bool aligned, uint lane) {
  T v[2 * W];
  load_neighbours<T, 2 * W>(row + tile_column(lane) * W, aligned, v);
#pragma unroll
  for (int t = 0; t < W; ++t) {
    to.at[t] = inside ? vec<T, 2>(v[2 * t], v[2 * t + 1]) : vec<T, 2>(T(0), T(0));
  }
}

template <typename T, int W>
inline void store_dealt_pairs(thread const Fragments<float, W>& from, device T* row, uint lane) {
  float v[2 * W];
#pragma unroll
  for (int t = 0; t < W; ++t) {
    v[2 * t] = from.at[t].x;
    v[2 * t + 1] = from.at[t].y;
  }
  store_neighbours<T, 2 * W>(row + tile_column(lane) * W, v);
}

}  // namespace mittens
