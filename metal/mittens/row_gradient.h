// Gradients along rows: dx by an op of row_op.h, and sums over the rows, dweight and dbias. A thread keeps its columns
// from row to row, and its shares of these sums in registers; they add up in a fixed order.
//
// The op's inputs are x, dy, weight (shared by all rows) and, where `adds` is 1, a term of dx. In addition to
// row_op.h it has share(x, dy, row), an element's share of dweight, and `whole`, set here where packs are aligned.
#pragma once

#include "mittens/row_op.h"

namespace mittens {

// Whether packs of the weight are loaded one by one for a row's sums, too: on Apple GPUs registers have no room for N.
constexpr bool late_weights(int N) {
  return !is_nvidia && N > 2;
}

// A thread's share of dweight and dbias, in its columns.
template <typename T, int N>
struct Shares {
  float weight[N + 1][16 / sizeof(T)];  // the last one is the edge element's
  float bias[N + 1][16 / sizeof(T)];
};

// Writes one row's dx and adds to the shares. Where `late`, weight and dsum are loaded pack by pack.
template <int N, bool late, bool whole, typename Op>
inline void write_row(
    Op op, typename Op::Row row, RowPlace place, RowBatch batch, thread PartsOf<Op, N>& parts,
    thread Shares<typename Op::Element, N>& shares) {
  using T = typename Op::Element;
  constexpr int K = Op::inputs;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    uint4 pack[K];
    float x[16 / sizeof(T)];
    float dy[16 / sizeof(T)];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      pack[k] = parts.packs[k][i];
    }
#pragma unroll
    for (int k = 2; late && k < (Op::adds ? K : 3); ++k) {
      const device T* array = op.rows[k].data + (k == 2 ? 0 : place.start);
      const bool there = !op.rows[k].absent && batch.has(i);
      pack[k] = there ? load_pack(array + batch.pack(i) * pack_size<T>(), whole) : pack_of<T>(k == 2 ? 1.0f : 0.0f);
    }
    unpack<T>(pack[0], x);
    unpack<T>(pack[1], dy);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      shares.weight[i][j] += op.share(x[j], dy[j], row);
      shares.bias[i][j] += dy[j];
    }
    if (batch.has(i)) {
      const uint4 none[1] = {uint4(0)};
      store_pack(op.y.data + place.start + batch.pack(i) * pack_size<T>(), whole, write_pack(op, row, pack, none));
    }
  }
  if (batch.edge) {
    write_edge<N>(op, row, place, batch, parts);
    shares.weight[N][0] += op.share(float(parts.edges[0]), float(parts.edges[1]), row);
    shares.bias[N][0] += float(parts.edges[1]);
  }
}

// Columns are dealt from the first one on, so that a thread's are the same in each row.
template <typename T>
inline RowBatch column_batch(constant RowParams& params, uint first, uint t, uint stride, uint end, bool edges) {
  const uint packs = params.columns / pack_size<T>();
  return RowBatch{first, stride, min(end, packs), t, edges && t < params.columns - packs * pack_size<T>()};
}

template <typename T>
inline uint edge_of(constant RowParams& params, RowBatch batch) {
  return params.columns / pack_size<T>() * pack_size<T>() + batch.t;
}

// Leaves a thread's sums at its columns.
template <typename T, int N>
inline void store_sums(
    device float* sums, thread const float (&v)[N + 1][16 / sizeof(T)], constant RowParams& params, RowBatch batch) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    device float* at = sums + batch.pack(i) * pack_size<T>();
#pragma unroll
    for (int j = 0; batch.has(i) && j < pack_size<T>(); j += 4) {
      if (params.whole) {
        *(device float4*)(at + j) = float4(v[i][j], v[i][j + 1], v[i][j + 2], v[i][j + 3]);
      } else {
#pragma unroll
        for (int e = j; e < j + 4; ++e) {
          at[e] = v[i][e];
        }
      }
    }
  }
  if (batch.edge) {
    sums[edge_of<T>(params, batch)] = v[N][0];
  }
}

// Terms of rows that coefficients has.
struct KnownRows {
  const device float4* coefficients;
};

// x and dy of a row.
template <int N, typename Op>
inline void load_pair(Op op, RowPlace place, RowBatch batch, thread PartsOf<Op, N>& parts) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    load_input<false, N>(op, k, place, batch, parts);
    load_edge<N>(op, k, place, batch, parts);
  }
}

template <typename T>
inline RowPlace at_row(uint row, uint columns, bool whole) {
  constexpr uint W = pack_size<T>();
  return RowPlace{RowSpan{0, columns / W, columns % W}, size_t(row) * columns, 0, whole, true};
}

// Of a threadgroup every other row has its own scratch, so that one barrier a row is enough.
inline void take_turns(thread ThreadgroupTeam& team, int numbers, bool odd) {
  team.scratch += odd ? -numbers : numbers;
}

template <typename Team>
inline void take_turns(thread Team&, int, bool) {}

// Goes down the rows first_row, first_row + step, ...: writes dx in the columns of `batch`, the same in each row, and
// returns the thread's shares. Where `ahead`, the next row is on its way while the sums of one are taken.
template <int N, bool ahead, bool whole, typename Op, typename Team>
inline Shares<typename Op::Element, N> vjp_rows(
    Op op, Team team, constant RowParams& params, uint first_row, uint step, RowBatch batch) {
  using T = typename Op::Element;
  constexpr bool late = N > (is_nvidia ? 2 : 1);  // there are no registers for all packs of all arrays
  const uint columns = params.columns;
  Shares<T, N> shares = {};
  PartsOf<Op, N> parts;
  PartsOf<Op, N> next;
  batch.edge = !whole && batch.edge;
  op.whole = whole;
  load_input<false, N>(op, 2, at_row<T>(0, columns, whole), batch, parts);
  load_edge<N>(op, 2, at_row<T>(0, columns, whole), batch, parts);
  if (ahead) {
    load_pair<N>(op, at_row<T>(first_row, columns, whole), batch, next);
  }
  bool odd = false;
  for (uint row = first_row; row < params.rows; row += step) {
    const RowPlace place = at_row<T>(row, columns, whole);
    if (!ahead) {
      load_pair<N>(op, place, batch, parts);
    } else {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          parts.packs[k][i] = next.packs[k][i];
        }
        parts.edges[k] = next.edges[k];
      }
      if (row + step < params.rows) {
        load_pair<N>(op, at_row<T>(row + step, columns, whole), batch, next);
      }
    }
    if constexpr (Op::adds) {
      if (!late) {
        load_input<false, N>(op, 3, place, batch, parts);
      }
      load_edge<N>(op, 3, place, batch, parts);
    }
    if (late && !late_weights(N)) {
      load_input<false, N>(op, 2, place, batch, parts);
    }
    typename Op::Row terms;
    if constexpr (is_same_v<Team, KnownRows>) {
      terms = team.coefficients[row];
    } else {
      terms = op.done(team.all(op, op.of(parts, batch)), columns);
      take_turns(team, 32 * Op::numbers, odd);
      odd = !odd;
      repack(parts, params.rows > 0);
    }
    write_row<N, late, whole>(op, terms, place, batch, parts, shares);
  }
  return shares;
}

// Adds a thread's sums to the sums of others, or stores them where it is the first.
template <typename T, int N>
inline void add_sums(
    threadgroup float* sums, thread const float (&v)[N + 1][16 / sizeof(T)], constant RowParams& params, RowBatch batch,
    bool first) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; batch.has(i) && j < pack_size<T>(); ++j) {
      const uint column = batch.pack(i) * pack_size<T>() + j;
      sums[column] = (first ? 0.0f : sums[column]) + v[i][j];
    }
  }
  if (batch.edge) {
    const uint column = edge_of<T>(params, batch);
    sums[column] = (first ? 0.0f : sums[column]) + v[N][0];
  }
}

template <int N, bool ahead, typename Op, typename Team>
inline Shares<typename Op::Element, N> vjp_rows(
    Op op, Team team, constant RowParams& params, uint first_row, uint step, RowBatch batch) {
  if (params.whole) {
    return vjp_rows<N, ahead, true>(op, team, params, first_row, step, batch);
  }
  return vjp_rows<N, false, false>(op, team, params, first_row, step, batch);
}

}  // namespace mittens
