// Arrays of ops along rows, and a thread's part of a row: its packs and edge elements (mittens/row_op.h).
#pragma once

#include "mittens/row_io.h"
#include "params/norm.h"

namespace mittens {

// A phase counts elements between the last 16-byte boundary and an array's start.
template <typename T>
struct RowInput {
  const device T* data;
  uint phase;
  bool shared;  // one row [columns] serves all; 1 stands for elements outside of it
  bool absent;
};

template <typename T>
struct RowOutput {
  device T* data;
  uint phase;
};

template <typename T>
struct WeightInput {
  const device T* data;
  uint phase;
  bool present;
};

// Arrays as RowOpParams has them: input k, weight c, result i.
template <typename T>
inline RowInput<T> input_of(const device T* data, constant RowOpParams& params, int k) {
  return RowInput<T>{data, params.row_phases[k], false, false};
}

template <typename T>
inline WeightInput<T> weight_of(const device T* data, constant RowOpParams& params, int c) {
  return WeightInput<T>{data, params.weight_phases[c], params.has_weights[c] != 0};
}

template <typename T>
inline RowOutput<T> output_of(device T* data, constant RowOpParams& params, int i) {
  return RowOutput<T>{data, params.y_phases[i]};
}

// For an op that reads the memory, and no other's result.
struct NoOp {
  using Row = bool;
  enum { reduces = 0, numbers = 0 };
};

// Where a row is in its arrays.
struct RowPlace {
  RowSpan span;
  size_t start;
  uint shift;
  bool whole;
  bool single;  // elements are moved one at a time, unless the row is whole

  template <typename T>
  bool aligned(uint phase) const {
    return whole || (!single && packs_aligned<T>(phase + shift, span));
  }
  template <typename T>
  bool weight_aligned(uint phase) const {
    return whole || (!single && packs_aligned<T>(phase, span));
  }
};

template <typename T>
inline RowPlace row_place(uint phase, uint row, constant RowParams& params, bool whole) {
  const uint shift = row * params.columns;
  const uint columns = row < params.rows ? params.columns : 0;
  const RowSpan span = whole ? row_span<T, true>(0, columns) : row_span<T>(phase + shift, columns);
  return RowPlace{span, size_t(row) * params.columns, shift, whole, false};
}

// A thread's elements of a row at once: the packs first, first + stride, ... below end, and perhaps edge element t.
struct RowBatch {
  uint first;
  uint stride;
  uint end;
  uint t;
  bool edge;

  uint pack(int i) const {
    return first + i * stride;
  }
  bool has(int i) const {
    return pack(i) < end;
  }
};

// A thread's elements of the K inputs of a row.
template <typename T, int K, int N>
struct RowParts {
  uint4 packs[K][N];
  T edges[K];
};

template <typename Op, int N>
using PartsOf = RowParts<typename Op::Element, Op::inputs, N>;

template <bool aligned, typename T, int N>
inline void load_packs(const device T* row, float fill, RowBatch batch, thread uint4 (&packs)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    packs[i] = batch.has(i) ? load_pack(row + batch.pack(i) * pack_size<T>(), aligned) : pack_of<T>(fill);
  }
}

template <bool aligned, typename T, int N>
inline void store_packs(device T* row, RowBatch batch, thread const uint4 (&packs)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (batch.has(i)) {
      store_pack(row + batch.pack(i) * pack_size<T>(), aligned, packs[i]);
    }
  }
}

// Leaves parts as they are if `always` is true. The compiler does not know that it is: code after this unpacks them
// anew, instead of holding values of all packs.
template <typename T, int K, int N>
inline void repack(thread RowParts<T, K, N>& parts, bool always) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      parts.packs[k][i] = always ? parts.packs[k][i] : uint4(0);
    }
  }
}

// For an op that goes over the parts of a row twice to take its Stat.
template <typename T, int K, int N>
inline void unpack_again(thread RowParts<T, K, N>& parts, RowInput<T> input, RowBatch batch) {
  repack(parts, is_nvidia ? batch.stride > 0 : input.phase < 16);
}

// Input k of an op; `leads` where packs are aligned to this one.
template <bool leads, int N, typename Op>
inline void load_input(Op op, int k, RowPlace place, RowBatch batch, thread PartsOf<Op, N>& parts) {
  using T = typename Op::Element;
  const RowInput<T> input = op.rows[k];
  const device T* row = input.data + (input.shared ? 0 : place.start) + place.span.head;
  batch.end = input.absent ? 0 : batch.end;
  const float fill = input.shared ? 1.0f : Op::fill;
  if (leads || (input.shared ? place.weight_aligned<T>(input.phase) : place.aligned<T>(input.phase))) {
    load_packs<true>(row, fill, batch, parts.packs[k]);
  } else {
    load_packs<false>(row, fill, batch, parts.packs[k]);
  }
}

// The edge element of the thread, where it has one.
template <int N, typename Op>
inline void load_edge(Op op, int k, RowPlace place, RowBatch batch, thread PartsOf<Op, N>& parts) {
  using T = typename Op::Element;
  const device T* row = op.rows[k].data + (op.rows[k].shared ? 0 : place.start);
  const bool there = batch.edge && !op.rows[k].absent;
  parts.edges[k] = there ? row[edge_column<T>(place.span, batch.t)] : T(op.rows[k].shared ? 1.0f : Op::fill);
}

// `leads` where packs are aligned to the first input.
template <bool leads, int N, typename Op>
inline void load_parts(Op op, RowPlace place, RowBatch batch, thread PartsOf<Op, N>& parts) {
  load_input<leads, N>(op, 0, place, batch, parts);
#pragma unroll
  for (int k = 1; k < Op::inputs; ++k) {
    load_input<false, N>(op, k, place, batch, parts);
  }
}

template <int N, typename Op>
inline void load_edges(Op op, RowPlace place, RowBatch batch, thread PartsOf<Op, N>& parts) {
#pragma unroll
  for (int k = 0; k < Op::inputs; ++k) {
    load_edge<N>(op, k, place, batch, parts);
  }
}

// The weights of a thread's first packs of a row: of each as many that two loads are in flight while the thread waits
// for its row, and after that.
template <typename Op, int N>
struct WeightParts {
  enum { count = Op::weights > 0 ? Op::weights : 1, ahead = Op::weights < 2 && N > 1 ? 2 : 1 };
  uint4 packs[count][ahead];
};

// Pack p of a weight, or zeros.
template <typename T>
inline uint4 load_weight(WeightInput<T> weight, bool aligned, RowPlace place, uint p, uint end) {
  const uint column = place.span.head + p * pack_size<T>();
  return weight.present && p < end ? load_pack(weight.data + column, aligned) : uint4(0);
}

template <int N, typename Op>
inline void load_weights(Op op, RowPlace place, RowBatch batch, thread WeightParts<Op, N>& weights) {
  using T = typename Op::Element;
  if constexpr (Op::weights > 0) {
#pragma unroll
    for (int c = 0; c < Op::weights; ++c) {
      RowBatch present = batch;
      present.end = op.columns[c].present ? batch.end : 0;
      const device T* weight = op.columns[c].data + place.span.head;
      if (place.weight_aligned<T>(op.columns[c].phase)) {
        load_packs<true>(weight, 0, present, weights.packs[c]);
      } else {
        load_packs<false>(weight, 0, present, weights.packs[c]);
      }
    }
  }
}

}  // namespace mittens
