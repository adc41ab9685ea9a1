// Functions of whole tiles, for the kernels of the ladder: they go behind metal/mittens/tile.h.
#pragma once

namespace mittens {

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
