// Rows of keys or of values, as they lie in memory: E neighbouring elements of a row are loaded as raw bits, and become
// floats where they are used. Packed rows are those of mx.quantize: integers with a scale and a bias for each group.
#pragma once

#include "mittens/dequantize.h"
#include "mittens/pack.h"

namespace mittens {

// From the elements of one lane on.
template <typename T>
struct PlainRows {
  const device T* elements;
  int stride;    // from row to row
  bool aligned;  // each lane's elements can be loaded at once
};

template <typename T, int bits>
struct PackedRows {
  const device uchar* bytes;
  const device T* scales;
  const device T* biases;
  int stride;  // bytes
  int scales_stride;
  int biases_stride;
  uint group_shift;  // a group is 1 << group_shift elements
  bool aligned;
};

template <typename Rows, int E>
struct RowElements;

template <typename T, int E>
struct RowElements<PlainRows<T>, E> {
  uint words[E * sizeof(T) / 4];
};

template <typename T, int bits, int E>
struct RowElements<PackedRows<T, bits>, E> {
  uint words[(E * bits + 31) / 32];
  T scale;
  T bias;
};

template <int W>
inline void load_words_at(const device uint* p, thread uint* words) {
  if constexpr (W == 1) {
    words[0] = *p;
  } else if constexpr (W == 2) {
    const uint2 v = *(const device uint2*)p;
    words[0] = v.x;
    words[1] = v.y;
  } else {
#pragma unroll
    for (int i = 0; i < W; i += 4) {
      const uint4 v = *(const device uint4*)(p + i);
      words[i] = v.x;
      words[i + 1] = v.y;
      words[i + 2] = v.z;
      words[i + 3] = v.w;
    }
  }
}

template <typename T>
inline PlainRows<T> at_row(PlainRows<T> rows, int row) {
  rows.elements += int64_t(row) * rows.stride;
  return rows;
}

template <typename T, int bits>
inline PackedRows<T, bits> at_row(PackedRows<T, bits> rows, int row) {
  rows.bytes += int64_t(row) * rows.stride;
  rows.scales += int64_t(row) * rows.scales_stride;
  rows.biases += int64_t(row) * rows.biases_stride;
  return rows;
}

template <typename T>
inline PlainRows<T> at_column(PlainRows<T> rows, uint column) {
  rows.elements += column;
  return rows;
}

template <typename T, int bits>
inline PackedRows<T, bits> at_column(PackedRows<T, bits> rows, uint column) {
  rows.bytes += column * bits / 8;
  rows.scales += column >> rows.group_shift;
  rows.biases += column >> rows.group_shift;
  return rows;
}

// One row; by whole vectors, if they are aligned.
template <bool aligned, typename T, int E>
inline void load_row(PlainRows<T> rows, int row, thread RowElements<PlainRows<T>, E>& to) {
  constexpr int W = E * sizeof(T) / 4;
  const device T* p = rows.elements + int64_t(row) * rows.stride;
  if constexpr (aligned) {
    load_words_at<W>((const device uint*)p, to.words);
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      to.words[i] = as_type<uint>(p[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      to.words[i] = uint(as_type<ushort>(p[2 * i])) | uint(as_type<ushort>(p[2 * i + 1])) << 16;
    }
  }
}

template <bool aligned, typename T, int bits, int E>
inline void load_row(PackedRows<T, bits> rows, int row, thread RowElements<PackedRows<T, bits>, E>& to) {
  constexpr int W = (E * bits + 31) / 32;
  const device uchar* p = rows.bytes + int64_t(row) * rows.stride;
  if constexpr (E * bits < 32) {
    to.words[0] = *(const device ushort*)p;
  } else if constexpr (aligned) {
    load_words_at<W>((const device uint*)p, to.words);
  } else {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      to.words[i] = ((const device uint*)p)[i];
    }
  }
  to.scale = rows.scales[int64_t(row) * rows.scales_stride];
  to.bias = rows.biases[int64_t(row) * rows.biases_stride];
}

template <typename T, int E>
inline void clear_row(thread RowElements<PlainRows<T>, E>& row) {
#pragma unroll
  for (uint i = 0; i < E * sizeof(T) / 4; ++i) {
    row.words[i] = 0;
  }
}

template <typename T, int bits, int E>
inline void clear_row(thread RowElements<PackedRows<T, bits>, E>& row) {
#pragma unroll
  for (int i = 0; i < (E * bits + 31) / 32; ++i) {
    row.words[i] = 0;
  }
  row.scale = T(0);
  row.bias = T(0);
}

template <typename Rows, int E, int N>
struct LoadedRows {
  RowElements<Rows, E> at[N];
};

// Rows first, first + stride, ... of those before `end`; zeros beyond. whole: all are there, for all lanes.
template <int stride, typename Rows, int E, int N>
inline void load_rows(Rows rows, uint first, uint end, bool whole, thread LoadedRows<Rows, E, N>& to) {
  const Rows from = at_row(rows, first);
  if (whole && rows.aligned) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      load_row<true>(from, n * stride, to.at[n]);
    }
  } else {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      clear_row(to.at[n]);
      if (first + n * stride < end) {
        load_row<false>(from, n * stride, to.at[n]);
      }
    }
  }
}

template <typename T, int E>
inline void widen(thread const RowElements<PlainRows<T>, E>& from, thread float (&v)[E]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < E; ++i) {
      v[i] = as_type<float>(from.words[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < E / 2; ++i) {
      const uint pair = from.words[i];
      if constexpr (is_same_v<T, half>) {
        const half2 both = as_type<half2>(pair);
        v[2 * i] = float(both.x);
        v[2 * i + 1] = float(both.y);
      } else {
        v[2 * i] = as_type<float>(pair << 16);
        v[2 * i + 1] = as_type<float>(pair & 0xffff0000u);
      }
    }
  }
}

// Integers are masked into the mantissa of 2^23, which taken off leaves them exact.
template <typename T, int bits, int E>
inline void widen(thread const RowElements<PackedRows<T, bits>, E>& from, thread float (&v)[E]) {
  constexpr int per_word = 32 / bits;
  const float scale = float(from.scale);
  const float bias = float(from.bias);
#pragma unroll
  for (int i = 0; i < E; ++i) {
    const uint integer = from.words[i / per_word] >> (bits * (i % per_word)) & ((1u << bits) - 1);
    v[i] = fma(as_type<float>(integer | 0x4b000000u) - 8388608.0f, scale, bias);
  }
}

}  // namespace mittens
