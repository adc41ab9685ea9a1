// A range of columns dealt to threads in packs so that each thread keeps its columns from row to row, as sums over rows
// need. A thread's pack i is the one numbered i * stride + t.
#pragma once

#include "mittens/pack.h"

namespace mittens {

struct ColumnMap {
  bool aligned;  // the range and every row start on 16-byte boundaries, and the columns fill packs
  uint t;        // of `stride` threads
  uint stride;
  uint begin;
  uint end;
};

// The column of the first element of the thread's pack i.
template <typename T>
inline uint column_of(ColumnMap map, uint i) {
  return map.begin + (i * map.stride + map.t) * pack_size<T>();
}

// The thread's pack i; zeros outside the range.
template <typename T>
inline uint4 load_columns(const device T* row, ColumnMap map, uint i) {
  const uint column = column_of<T>(map, i);
  if (map.aligned) {
    return column < map.end ? load_pack(row + column, true) : uint4(0);
  }
  float v[16 / sizeof(T)];
#pragma unroll
  for (int j = 0; j < pack_size<T>(); ++j) {
    v[j] = column + j < map.end ? float(row[column + j]) : 0.0f;
  }
  return pack<T>(v);
}

template <typename T>
inline void store_columns(device T* row, ColumnMap map, uint i, thread const float (&v)[16 / sizeof(T)]) {
  const uint column = column_of<T>(map, i);
  if (map.aligned) {
    if (column < map.end) {
      store_pack(row + column, true, pack<T>(v));
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < pack_size<T>(); ++j) {
    if (column + j < map.end) {
      row[column + j] = T(v[j]);
    }
  }
}

// float32 sums of the columns of the thread's pack i; sums[] is on a 16-byte boundary.
template <typename T>
inline void store_sums(device float* sums, ColumnMap map, uint i, thread const float (&v)[16 / sizeof(T)]) {
  const uint column = column_of<T>(map, i);
  if (map.aligned) {
#pragma unroll
    for (int j = 0; j < pack_size<T>(); j += 4) {
      if (column < map.end) {
        *(device float4*)(sums + column + j) = float4(v[j], v[j + 1], v[j + 2], v[j + 3]);
      }
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < pack_size<T>(); ++j) {
    if (column + j < map.end) {
      sums[column + j] = v[j];
    }
  }
}

// What a thread holds of a row.
template <int N>
struct ColumnPart {
  uint4 packs[N];
};

template <typename T, int N>
inline void load_part(const device T* row, ColumnMap map, thread ColumnPart<N>& part) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    part.packs[i] = load_columns(row, map, i);
  }
}

}  // namespace mittens
