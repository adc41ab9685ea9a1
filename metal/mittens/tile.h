// 8x8 matrices over a simdgroup, and tiles of them in registers. A lane holds two neighbours of one row of each matrix.
//
// Names: rows and columns count elements; R and C count matrices. Tiles hold T; sums are in float.
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

// Which columns of a and rows of b meet in a product is free as long as both agree. Lanes load runs of neighbours, and
// schedules follow one of two rules:
//
//   pairs    each of the four lanes that hold a row has a run of it: matrix t has two elements of each run,
//            first_of_pair<apart>(t) and second_of_pair<apart>(t), `apart` from each other
//   singles  each of eight lanes has a run: matrix t has element t of each
template <int apart>
constexpr int first_of_pair(int t) {
  return t / apart * 2 * apart + t % apart;
}

template <int apart>
constexpr int second_of_pair(int t) {
  return first_of_pair<apart>(t) + apart;
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

// 8 * R rows by 8 * C columns.
template <typename T, int R, int C>
struct Tile {
  vec<T, 2> at[R][C];
};

// A value for each row: a lane has its row's in each block of 8.
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

// Over the four lanes that hold a row.
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

// values += the lane's own elements of each row; lanes_of_row_sum completes it, once for many tiles.
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

}  // namespace mittens
