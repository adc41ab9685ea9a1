// Writing a thread's part of a row by an op (mittens/row_op.h).
#pragma once

#include "mittens/row_parts.h"

namespace mittens {

// The result for one pack of each input and weight.
template <typename Op>
inline uint4 write_pack(
    Op op, typename Op::Row row, thread const uint4 (&inputs)[Op::inputs],
    thread const uint4 (&weights)[Op::weights > 0 ? Op::weights : 1]) {
  using T = typename Op::Element;
  float v[Op::inputs][16 / sizeof(T)];
  float w[Op::weights > 0 ? Op::weights : 1][16 / sizeof(T)];
#pragma unroll
  for (int k = 0; k < Op::inputs; ++k) {
    unpack<T>(inputs[k], v[k]);
  }
#pragma unroll
  for (int c = 0; c < Op::weights; ++c) {
    unpack<T>(weights[c], w[c]);
  }
  op.write(v, w, row);
  return pack<T>(v[0]);
}

// Writes an edge element.
template <int N, typename Op>
inline typename Op::Element write_edge(
    Op op, typename Op::Row row, RowPlace place, RowBatch batch, thread const PartsOf<Op, N>& parts) {
  using T = typename Op::Element;
  const uint column = edge_column<T>(place.span, batch.t);
  float v[Op::inputs][1];
  float w[Op::weights > 0 ? Op::weights : 1][1];
#pragma unroll
  for (int k = 0; k < Op::inputs; ++k) {
    v[k][0] = float(parts.edges[k]);
  }
  if constexpr (Op::weights > 0) {
#pragma unroll
    for (int c = 0; c < Op::weights; ++c) {
      w[c][0] = op.columns[c].present ? float(op.columns[c].data[column]) : 0.0f;
    }
  }
  op.write(v, w, row);
  op.y.data[place.start + column] = T(v[0][0]);
  return T(v[0][0]);
}

// Writes pack p of y for the first pack of each input and weight; the ones behind them move up.
template <int N, typename Op>
inline void write_next(
    Op op, typename Op::Row row, RowPlace place, RowBatch batch, uint p, thread PartsOf<Op, N>& parts,
    thread WeightParts<Op, N>& weights) {
  using T = typename Op::Element;
  constexpr int ahead = WeightParts<Op, N>::ahead;
  uint4 x[Op::inputs];
  uint4 w[Op::weights > 0 ? Op::weights : 1];
#pragma unroll
  for (int k = 0; k < Op::inputs; ++k) {
    x[k] = parts.packs[k][0];
#pragma unroll
    for (int n = 1; n < N; ++n) {
      parts.packs[k][n - 1] = parts.packs[k][n];
    }
  }
  if constexpr (Op::weights > 0) {
#pragma unroll
    for (int c = 0; c < Op::weights; ++c) {
      w[c] = weights.packs[c][0];
#pragma unroll
      for (int n = 1; n < ahead; ++n) {
        weights.packs[c][n - 1] = weights.packs[c][n];
      }
      if (N > ahead) {
        const bool aligned = place.weight_aligned<T>(op.columns[c].phase);
        weights.packs[c][ahead - 1] = load_weight(op.columns[c], aligned, place, p + ahead * batch.stride, batch.end);
      }
    }
  }
  device T* y = op.y.data + place.start + place.span.head;
  store_pack(y + p * pack_size<T>(), place.aligned<T>(op.y.phase), write_pack(op, row, x, w));
}

// Writes y for the inputs in parts, which it uses up: a loop whose packs move up keeps them packed until their turn
// comes. On Apple GPUs it does not count them, or the compiler would unroll it and hold values of all packs.
template <int N, typename Op>
inline void write_parts(
    Op op, typename Op::Row row, RowPlace place, RowBatch batch, thread PartsOf<Op, N>& parts,
    thread WeightParts<Op, N>& weights) {
  if constexpr (is_nvidia || N == 1) {
#pragma unroll 1
    for (int i = 0; i < N && batch.has(i); ++i) {
      write_next<N>(op, row, place, batch, batch.pack(i), parts, weights);
    }
  } else {
    const uint end = min(batch.end, batch.pack(N));
#pragma unroll 1
    for (uint p = batch.first; p < end; p += batch.stride) {
      write_next<N>(op, row, place, batch, p, parts, weights);
    }
  }
}

// Whether on Apple GPUs there are no registers for N packs of each input of an op whose result is kept: packs of the
// first input are held, the others are loaded when their turn comes.
template <typename Op, int N>
constexpr bool late_inputs() {
  return !is_nvidia && (Op::reduces ? N > 1 : N > 2);
}

template <typename Op>
inline uint4 load_late(Op op, int k, RowPlace place, uint p) {
  using T = typename Op::Element;
  const device T* row = op.rows[k].data + place.start + place.span.head;
  return load_pack(row + p * pack_size<T>(), place.aligned<T>(op.rows[k].phase));
}

// Writes y, which is kept: the input of the next op.
template <int N, typename Op>
inline RowParts<typename Op::Element, 1, N> rewrite_parts(
    Op op, typename Op::Row row, float fill, RowPlace place, RowBatch batch, thread const PartsOf<Op, N>& parts,
    thread const WeightParts<Op, N>& weights) {
  using T = typename Op::Element;
  RowParts<T, 1, N> result;
  device T* y = op.y.data + place.start;
  result.edges[0] = batch.edge ? write_edge<N>(op, row, place, batch, parts) : T(fill);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    result.packs[0][i] = pack_of<T>(fill);
    if (batch.has(i)) {
      uint4 x[Op::inputs];
      uint4 w[Op::weights > 0 ? Op::weights : 1];
#pragma unroll
      for (int k = 0; k < Op::inputs; ++k) {
        x[k] = k > 0 && late_inputs<Op, N>() ? load_late(op, k, place, batch.pack(i)) : parts.packs[k][i];
      }
      if constexpr (Op::weights > 0) {
#pragma unroll
        for (int c = 0; c < Op::weights; ++c) {
          const bool weight_aligned = place.weight_aligned<T>(op.columns[c].phase);
          w[c] = i < WeightParts<Op, N>::ahead
                     ? weights.packs[c][i]
                     : load_weight(op.columns[c], weight_aligned, place, batch.pack(i), batch.end);
        }
      }
      result.packs[0][i] = write_pack(op, row, x, w);
    }
  }
  if (place.aligned<T>(op.y.phase)) {
    store_packs<true>(y + place.span.head, batch, result.packs[0]);
  } else {
    store_packs<false>(y + place.span.head, batch, result.packs[0]);
  }
  return result;
}

}  // namespace mittens
