// 8x8 matrices over a simdgroup, and tiles of them in registers. A lane holds two neighbours of one row of each matrix.
//
// Names: rows and columns count elements; R and C count matrices. Tiles hold T; what is summed up is in float.
#pragma once

#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

using namespace metal;

namespace mittens {

// The row of a lane's two elements.
inline uint tile_row(uint lane) {
  return (lane / 4 & 4) + lane / 2 % 4;
}

// The column of the first of them.
inline uint tile_column(uint lane) {
  return (lane / 4 & 2) * 2 + lane % 2 * 2;
}

// The lane that holds an element.
inline ushort tile_lane(uint row, uint column) {
  return ushort((row & 4) << 2 | (column & 4) << 1 | (row & 3) << 1 | (column & 2) >> 1);
}

template <typename T>
inline simdgroup_matrix<T, 8, 8> tile_of(vec<T, 2> own) {
  simdgroup_matrix<T, 8, 8> tile;
  reinterpret_cast<thread vec<T, 2>&>(tile.thread_elements()) = own;
  return tile;
}

// c + a * b, sums in float32.
template <typename T>
inline float2 multiply_tiles(vec<T, 2> a, vec<T, 2> b, float2 c) {
  simdgroup_matrix<float, 8, 8> sum = tile_of<float>(c);
  simdgroup_multiply_accumulate(sum, tile_of<T>(a), tile_of<T>(b), sum);
  return reinterpret_cast<thread float2&>(sum.thread_elements());
}

// The lower or the upper halves of two words. Not by masks and shifts: compilers would merge those with the masks and
// shifts by which callers take integers out of the halves, into more instructions.
inline uint side_by_side(uint first, uint second, bool upper) {
  const ushort2 a = as_type<ushort2>(first);
  const ushort2 b = as_type<ushort2>(second);
  return as_type<uint>(upper ? ushort2(a.y, b.y) : ushort2(a.x, b.x));
}

// Of elements that fill words one after the other, the word that holds element i.
template <typename T>
constexpr int element_word(int i) {
  return i * sizeof(T) / 4;
}

// Element i of two runs, from the words that hold it.
template <typename T>
inline vec<T, 2> element_of_both(uint first, uint second, int i) {
  if constexpr (sizeof(T) == 4) {
    return as_type<float2>(uint2(first, second));
  } else {
    return as_type<vec<T, 2>>(side_by_side(first, second, i % 2));
  }
}

// Lane `from`'s pair; two elements of half a word as one word, since Metal shuffles no bfloat.
template <typename T>
inline vec<T, 2> shuffled(vec<T, 2> own, ushort from) {
  if constexpr (sizeof(T) == 2) {
    return as_type<vec<T, 2>>(simd_shuffle(as_type<uint>(own), from));
  } else {
    return simd_shuffle(own, from);
  }
}

// The lane's elements of the transposed matrix.
template <typename T>
inline vec<T, 2> transposed(vec<T, 2> own, uint lane) {
  vec<T, 2> result;
#pragma unroll
  for (uint i = 0; i < 2; ++i) {
    const ushort from = tile_lane(tile_column(lane) + i, tile_row(lane));
    const vec<T, 2> pair = shuffled<T>(own, from);
    result[i] = tile_row(lane) % 2 ? pair.y : pair.x;
  }
  return result;
}

// 8 * R rows by 8 * C columns.
template <typename T, int R, int C>
struct Tile {
  vec<T, 2> at[R][C];
};

// A value for each row: that of the lane's row in each block of 8.
template <int R>
struct RowValues {
  float at[R];
};

template <typename T, int R, int C>
inline void fill(thread Tile<T, R, C>& tile, T value) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      tile.at[r][c] = vec<T, 2>(value, value);
    }
  }
}

template <int R>
inline void fill(thread RowValues<R>& values, float value) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
    values.at[r] = value;
  }
}

// Pointer: to device or threadgroup memory; stride: elements from row to row.
template <typename T, int R, int C, typename Pointer>
inline void load(thread Tile<T, R, C>& tile, Pointer from, uint stride, uint lane) {
  from += tile_row(lane) * stride + tile_column(lane);
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        tile.at[r][c][i] = T(from[size_t(r) * 8 * stride + c * 8 + i]);
      }
    }
  }
}

// Where only the first `rows` rows and `columns` columns are there; the others are `outside`.
template <typename T, int R, int C, typename Pointer>
inline void load(
    thread Tile<T, R, C>& tile, Pointer from, uint stride, uint rows, uint columns, T outside, uint lane) {
  const uint row = tile_row(lane);
  const uint column = tile_column(lane);
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool inside = r * 8 + row < rows && c * 8 + column + i < columns;
        tile.at[r][c][i] = outside;
        if (inside) {
          tile.at[r][c][i] = T(from[size_t(r * 8 + row) * stride + c * 8 + column + i]);
        }
      }
    }
  }
}

// Element type U of what is stored to.
template <typename U, typename T, int R, int C, typename Pointer>
inline void store(thread const Tile<T, R, C>& tile, Pointer to, uint stride, uint lane) {
  to += tile_row(lane) * stride + tile_column(lane);
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        to[size_t(r) * 8 * stride + c * 8 + i] = U(tile.at[r][c][i]);
      }
    }
  }
}

template <typename U, typename T, int R, int C, typename Pointer>
inline void store(thread const Tile<T, R, C>& tile, Pointer to, uint stride, uint rows, uint columns, uint lane) {
  const uint row = tile_row(lane);
  const uint column = tile_column(lane);
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (r * 8 + row < rows && c * 8 + column + i < columns) {
          to[size_t(r * 8 + row) * stride + c * 8 + column + i] = U(tile.at[r][c][i]);
        }
      }
    }
  }
}

template <typename U, typename T, int R, int C>
inline Tile<U, R, C> converted(thread const Tile<T, R, C>& tile) {
  Tile<U, R, C> result;
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      result.at[r][c] = vec<U, 2>(U(tile.at[r][c].x), U(tile.at[r][c].y));
    }
  }
  return result;
}

template <typename T, int R, int C>
inline Tile<T, C, R> transposed(thread const Tile<T, R, C>& tile, uint lane) {
  Tile<T, C, R> result;
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      result.at[c][r] = transposed<T>(tile.at[r][c], lane);
    }
  }
  return result;
}

// sums += a b
template <typename T, int R, int K, int C>
inline void multiply_add(
    thread Tile<float, R, C>& sums, thread const Tile<T, R, K>& a, thread const Tile<T, K, C>& b) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        sums.at[r][c] = multiply_tiles<T>(a.at[r][k], b.at[k][c], sums.at[r][c]);
      }
    }
  }
}

// sums += a b^T
template <typename T, int R, int K, int C>
inline void multiply_add_abt(
    thread Tile<float, R, C>& sums, thread const Tile<T, R, K>& a, thread const Tile<T, C, K>& b, uint lane) {
  const Tile<T, K, C> turned = transposed(b, lane);
  multiply_add(sums, a, turned);
}

// Over the four lanes that hold a row.
inline float lanes_of_row_max(float v) {
  v = max(v, simd_shuffle_xor(v, ushort(1)));
  return max(v, simd_shuffle_xor(v, ushort(8)));
}

inline float lanes_of_row_sum(float v) {
  v += simd_shuffle_xor(v, ushort(1));
  return v + simd_shuffle_xor(v, ushort(8));
}

// Over the eight lanes that hold a column, for the lane's two.
inline float2 lanes_of_column_max(float2 v) {
  v = max(v, simd_shuffle_xor(v, ushort(2)));
  v = max(v, simd_shuffle_xor(v, ushort(4)));
  return max(v, simd_shuffle_xor(v, ushort(16)));
}

inline float2 lanes_of_column_sum(float2 v) {
  v += simd_shuffle_xor(v, ushort(2));
  v += simd_shuffle_xor(v, ushort(4));
  return v + simd_shuffle_xor(v, ushort(16));
}

// values = max(values, each row's maximum)
template <int R, int C>
inline void row_max(thread const Tile<float, R, C>& tile, thread RowValues<R>& values) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
    float own = max(tile.at[r][0].x, tile.at[r][0].y);
#pragma unroll
    for (int c = 1; c < C; ++c) {
      own = max(own, max(tile.at[r][c].x, tile.at[r][c].y));
    }
    values.at[r] = max(values.at[r], lanes_of_row_max(own));
  }
}

// values += what the lane itself has of each row; lanes_of_row_sum completes it, once for many tiles.
template <int R, int C>
inline void row_sum_of_lane(thread const Tile<float, R, C>& tile, thread RowValues<R>& values) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      values.at[r] += tile.at[r][c].x + tile.at[r][c].y;
    }
  }
}

// values += each row's sum
template <int R, int C>
inline void row_sum(thread const Tile<float, R, C>& tile, thread RowValues<R>& values) {
  RowValues<R> own;
  fill(own, 0.0f);
  row_sum_of_lane(tile, own);
#pragma unroll
  for (int r = 0; r < R; ++r) {
    values.at[r] += lanes_of_row_sum(own.at[r]);
  }
}

template <typename T, int R, int C>
inline void add(thread Tile<T, R, C>& tile, thread const Tile<T, R, C>& other) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      tile.at[r][c] += other.at[r][c];
    }
  }
}

template <int R, int C>
inline void multiply(thread Tile<float, R, C>& tile, float factor) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      tile.at[r][c] *= factor;
    }
  }
}

template <int R, int C>
inline void multiply_rows(thread Tile<float, R, C>& tile, thread const RowValues<R>& factors) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      tile.at[r][c] *= factors.at[r];
    }
  }
}

template <int R, int C>
inline void subtract_rows(thread Tile<float, R, C>& tile, thread const RowValues<R>& values) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      tile.at[r][c] -= values.at[r];
    }
  }
}

template <int R, int C>
inline void exp2_of(thread Tile<float, R, C>& tile) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      tile.at[r][c] = float2(fast::exp2(tile.at[r][c].x), fast::exp2(tile.at[r][c].y));
    }
  }
}

// Elements of row i from column i + first on.
template <int R, int C>
inline void fill_from(thread Tile<float, R, C>& tile, int first, float value, uint lane) {
  const int distance = int(tile_column(lane)) - int(tile_row(lane)) - first;
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        tile.at[r][c][i] = distance + 8 * (c - r) + i >= 0 ? value : tile.at[r][c][i];
      }
    }
  }
}

}  // namespace mittens
