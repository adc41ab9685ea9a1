// Ops along rows: norms, softmax and the like. An op says what it computes; each schedule is written once, here.
//
// An op is a struct of its arrays and numbers:
//
//   rows[inputs]      arrays [rows, columns]; packs are aligned to the first one's rows
//   columns[weights]  arrays [columns]; each may be absent
//   y                 the result [rows, columns]
//
// and four functions:
//
//   none    Stat of no element, where reduces is 1; fill stands for elements outside of a row
//   of      Stat of one thread's elements of a row
//   done    Row, the numbers that writing needs, from the Stat of all elements
//   write   v[0][i], an element of the result, from inputs v[k][i] and weights w[c][i]; it is
//           called with packs and with single elements
//
// A Stat is a sum, or a struct with functions of its own, for results of type T: merge<T> of two sets of elements;
// across<T, L> of the L lanes that share a row, in each of them; write_stat and read_stat to memory and back. An op
// with reduces 0 only writes.
//
// The result of one op may be the input of the next: run_rows takes two. `first` is written in passing, and never read
// again where a row stays in registers.
//
// To add an op: its struct, and a kernel that hands it on to a schedule (norm/rms_norm.metal); instantiate_rows names
// its variants as the table of schedules in csrc/ops/norm/plan.h does. RowPrimitive::row_launches binds arguments in
// the order of rows, weights, results, partials, params; partials are of split rows alone, as many as the op's numbers
// for each part of a row.
#pragma once

#include "mittens/instantiate.h"
#include "mittens/reduce.h"
#include "mittens/row_io.h"
#include "params/norm.h"

namespace mittens {

// The last parameters of a row kernel, and the arguments that hand them on.
#define row_thread_parameters                                                             \
  uint group [[threadgroup_position_in_grid]], uint t [[thread_position_in_threadgroup]], \
      uint threads [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],  \
      uint simdgroup [[simdgroup_index_in_threadgroup]], uint simdgroups [[simdgroups_per_threadgroup]]
#define row_thread RowThread{group, t, threads, ThreadPosition{lane, simdgroup, simdgroups}}

struct RowThread {
  uint group;
  uint t;
  uint threads;
  ThreadPosition position;
};

// The schedules of a whole row. The host chooses by the length of a row (csrc/ops/norm/plan.h).

// L lanes a row, no barrier; the row stays in registers, in N packs a lane.
template <int L, int N>
struct InLanes {
  enum { launched = 256, nvidia = 256 };
};

// One threadgroup a row, which stays in registers, in N packs a thread: one read, one barrier.
template <int N>
struct InThreadgroup {
  enum { launched = N == 8 ? 256 : 512, nvidia = 512 };
};

// One threadgroup a row, which is read twice, N packs a thread at once.
template <int N, int Threads = 512>
struct Looped {
  enum { launched = Threads, nvidia = 512 };
};

// One threadgroup a row, which stays in registers on NVIDIA GPUs, and is read twice on Apple's: of ops whose N packs a
// thread would leave room for half as many threads there.
template <int N>
using InThreadgroupOrLooped = conditional_t<is_nvidia, InThreadgroup<N>, Looped<1, InThreadgroup<N>::launched>>;

// The two launches of a row that several threadgroups share. In the first each leaves the Stat of its part of the row
// in partials, in the second it merges all parts and writes its own.
struct SplitSums {
  enum { launched = 256, nvidia = 256 };
};
struct SplitWrite {
  enum { launched = 256, nvidia = 256 };
};

// Packs that a thread of a split row takes at once.
constant constexpr int split_packs = 2;

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
        weights.packs[c][ahead - 1] =
            load_weight(op.columns[c], aligned, place, p + ahead * batch.stride, batch.end);
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

// Who shares a row: L lanes of a simdgroup.
template <int L>
struct LaneTeam {
  uint t;
  uint stride;
  uint lane;
  uint columns;

  template <typename Op>
  typename Op::Stat all(Op, typename Op::Stat own) const {
    return across<typename Op::Element, L>(own, lane, float(columns));
  }

  template <typename Op>
  LaneTeam after(Op) const {
    return *this;
  }
};

// A threadgroup. One barrier a use of the scratch, [32 * numbers].
struct ThreadgroupTeam {
  uint t;
  uint stride;
  ThreadPosition position;
  uint columns;
  threadgroup float* scratch;

  template <typename Op>
  typename Op::Stat all(Op op, typename Op::Stat own) const {
    using T = typename Op::Element;
    own = across<T, 32>(own, position.lane, 0);
    if (position.lane == 0) {
      write_stat(scratch + Op::numbers * position.simdgroup, own);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    typename Op::Stat other = op.none();
    if (position.lane < position.simdgroups) {
      read_stat(scratch + Op::numbers * position.lane, other);
    }
    return across<T, 32>(other, position.lane, float(columns));
  }

  // For the next op: another part of the scratch.
  template <typename Op>
  ThreadgroupTeam after(Op) const {
    return ThreadgroupTeam{t, stride, position, columns, scratch + 32 * Op::numbers};
  }
};

// The row that an op gets: as loaded, or the result of `first`.
template <int N, typename Op, typename Team>
inline PartsOf<Op, N> row_input(
    NoOp, Team, uint, Op, RowPlace, RowBatch, thread const PartsOf<Op, N>& parts, thread const WeightParts<Op, N>&) {
  return parts;
}

template <int N, typename First, typename Op, typename Team>
inline RowParts<typename Op::Element, 1, N> row_input(
    First first, Team team, uint columns, Op op, RowPlace place, RowBatch batch,
    thread const PartsOf<First, N>& parts, thread const WeightParts<First, N>& weights) {
  typename First::Row terms = typename First::Row();
  if constexpr (First::reduces) {
    terms = first.done(team.all(first, first.of(parts, batch)), columns);
  }
  return rewrite_parts<N>(first, terms, Op::fill, place, batch, parts, weights);
}

// The op that reads the arrays.
template <typename First, typename Op>
inline First lead_of(First first, Op) {
  return first;
}

template <typename Op>
inline Op lead_of(NoOp, Op op) {
  return op;
}

// A row in registers.
template <int N, typename First, typename Op, typename Team>
inline void row_held(First first, Op op, Team team, constant RowParams& params, uint row, bool whole) {
  const auto lead = lead_of(first, op);
  using Lead = decltype(lead_of(first, op));
  // Where weights would take too many registers from the row, they are on their way from its own sums on.
  constexpr bool late = Op::reduces && (Op::weights > 1 || (!is_same_v<First, NoOp> && N > 2));
  const RowPlace place = row_place<typename Op::Element>(lead.rows[0].phase, row, params, whole);
  const RowBatch batch =
      RowBatch{team.t, team.stride, place.span.packs, team.t, !whole && team.t < place.span.edges};
  PartsOf<Lead, N> parts;
  WeightParts<Lead, N> lead_weights;
  WeightParts<Op, N> weights;
  load_parts<true, N>(lead, place, batch, parts);
  load_edges<N>(lead, place, batch, parts);
  if constexpr (!is_same_v<First, NoOp>) {
    load_weights<N>(first, place, batch, lead_weights);
  }
  if (!late) {
    load_weights<N>(op, place, batch, weights);
  }
  auto input = row_input<N>(first, team, params.columns, op, place, batch, parts, lead_weights);
  typename Op::Row terms = typename Op::Row();
  if constexpr (Op::reduces) {
    const typename Op::Stat own = op.of(input, batch);
    if (late) {
      load_weights<N>(op, place, batch, weights);
    }
    terms = op.done(team.after(first).all(op, own), params.columns);
  }
  if (batch.edge) {
    write_edge<N>(op, terms, place, batch, input);
  }
  write_parts<N>(op, terms, place, batch, input, weights);
}

// A part of a row that does not stay in registers: packs begin .. end, and the edges if the caller takes them.
struct RowRange {
  RowPlace place;
  uint begin;
  uint end;
  bool edges;
  uint t;
  uint threads;

  // The edge element goes with the first batch, which may hold no pack.
  RowBatch batch(uint first) const {
    return RowBatch{first, threads, end, t, edges && first == begin + t && t < place.span.edges};
  }
};

// Stat of a thread's elements of a range; the result of `first` is written.
template <int N, typename First, typename Op>
inline typename Op::Stat range_stat(First first, typename First::Row first_terms, Op op, RowRange range) {
  const auto lead = lead_of(first, op);
  using Lead = decltype(lead_of(first, op));
  using T = typename Op::Element;
  typename Op::Stat own = op.none();
  for (uint at = range.begin + range.t; at == range.begin + range.t || at < range.end; at += N * range.threads) {
    const RowBatch batch = range.batch(at);
    PartsOf<Lead, N> parts;
    load_parts<true, N>(lead, range.place, batch, parts);
    load_edges<N>(lead, range.place, batch, parts);
    if constexpr (is_same_v<First, NoOp>) {
      own = merge<T>(own, op.of(parts, batch));
    } else {
      WeightParts<First, N> weights;
      load_weights<N>(first, range.place, batch, weights);
      own = merge<T>(
          own, op.of(rewrite_parts<N>(first, first_terms, Op::fill, range.place, batch, parts, weights), batch));
    }
  }
  return own;
}

// Writes a range.
template <bool leads, int N, typename Op>
inline void range_write(Op op, typename Op::Row terms, RowRange range) {
  PartsOf<Op, N> parts;
  for (uint at = range.begin + range.t; at < range.end; at += N * range.threads) {
    const RowBatch batch = range.batch(at);
    WeightParts<Op, N> weights;
    load_parts<leads, N>(op, range.place, batch, parts);
    load_weights<N>(op, range.place, batch, weights);
    write_parts<N>(op, terms, range.place, batch, parts, weights);
  }
  const RowBatch edges = range.batch(range.begin + range.t);
  if (edges.edge) {
    load_edges<N>(op, range.place, edges, parts);
    write_edge<N>(op, terms, range.place, edges, parts);
  }
}

template <int L, int N, typename First, typename Op>
inline void run_rows(
    InLanes<L, N>, First first, Op op, constant RowParams& params, RowThread thread_of, threadgroup float*,
    device float* = nullptr) {
  const ThreadPosition position = thread_of.position;
  const uint row = (thread_of.group * position.simdgroups + position.simdgroup) * (32 / L) + position.lane / L;
  const LaneTeam<L> team = LaneTeam<L>{position.lane % L, L, position.lane, params.columns};
  if (params.whole) {
    row_held<N>(first, op, team, params, row, true);
  } else {
    row_held<N>(first, op, team, params, row, false);
  }
}

inline ThreadgroupTeam threadgroup_team(constant RowParams& params, RowThread thread_of, threadgroup float* scratch) {
  return ThreadgroupTeam{thread_of.t, thread_of.threads, thread_of.position, params.columns, scratch};
}

template <int N, typename First, typename Op>
inline void run_rows(
    InThreadgroup<N>, First first, Op op, constant RowParams& params, RowThread thread_of,
    threadgroup float* scratch, device float* = nullptr) {
  const ThreadgroupTeam team = threadgroup_team(params, thread_of, scratch);
  if (params.whole) {
    row_held<N>(first, op, team, params, thread_of.group, true);
  } else {
    row_held<N>(first, op, team, params, thread_of.group, false);
  }
}

template <int N, int Threads, typename First, typename Op>
inline void run_rows(
    Looped<N, Threads>, First first, Op op, constant RowParams& params, RowThread thread_of,
    threadgroup float* scratch, device float* = nullptr) {
  const auto lead = lead_of(first, op);
  const RowPlace place =
      row_place<typename Op::Element>(lead.rows[0].phase, thread_of.group, params, false);
  const RowRange range = RowRange{place, 0, place.span.packs, true, thread_of.t, thread_of.threads};
  ThreadgroupTeam team = threadgroup_team(params, thread_of, scratch);
  typename First::Row first_terms = typename First::Row();
  if constexpr (First::reduces) {
    first_terms = first.done(team.all(first, range_stat<N>(NoOp(), false, first, range)), params.columns);
    team = team.after(first);
  }
  const typename Op::Stat own = range_stat<N>(first, first_terms, op, range);
  constexpr bool leads = is_same_v<First, NoOp>;
  range_write<leads, N>(op, op.done(team.all(op, own), params.columns), range);
}

// The part of a row that a threadgroup of a split takes.
template <typename Lead>
inline RowRange split_range(Lead lead, constant RowParams& params, RowThread thread_of) {
  const uint split = thread_of.group % params.splits;
  const RowPlace place =
      row_place<typename Lead::Element>(lead.rows[0].phase, thread_of.group / params.splits, params, false);
  const uint begin = split * params.packs_per_split;
  const uint end = min(begin + params.packs_per_split, place.span.packs);
  return RowRange{place, begin, end, split == 0, thread_of.t, thread_of.threads};
}

template <typename First, typename Op>
inline void run_rows(
    SplitSums, First first, Op op, constant RowParams& params, RowThread thread_of, threadgroup float* scratch,
    device float* partials) {
  static_assert(!First::reduces, "the whole row is known after one more kernel");
  const RowRange range = split_range(lead_of(first, op), params, thread_of);
  const typename Op::Stat own = range_stat<split_packs>(first, typename First::Row(), op, range);
  ThreadgroupTeam team = threadgroup_team(params, thread_of, scratch);
  team.columns = 0;  // it has a part of them
  const typename Op::Stat all = team.all(op, own);
  if (thread_of.t == 0) {
    write_stat(partials + Op::numbers * size_t(thread_of.group), all);
  }
}

// The first launch wrote the result of `first`, which is read here.
template <typename First, typename Op>
inline void run_rows(
    SplitWrite, First, Op op, constant RowParams& params, RowThread thread_of, threadgroup float*,
    device float* partials) {
  using T = typename Op::Element;
  const RowRange range = split_range(op, params, thread_of);
  typename Op::Stat all = op.none();
  for (uint i = thread_of.position.lane; i < params.splits; i += 32) {
    typename Op::Stat other;
    read_stat(partials + Op::numbers * size_t(thread_of.group / params.splits * params.splits + i), other);
    all = merge<T>(all, other);
  }
  all = across<T, 32>(all, thread_of.position.lane, float(params.columns));
  range_write<true, split_packs>(op, op.done(all, params.columns), range);
}

}  // namespace mittens

// Kernels of the table of schedules in csrc/ops/norm/plan.h, one for each element type. `function` takes the element
// type and the schedule.
#define instantiate_rows(name, function)                       \
  instantiate_types(name "_simd8", function, InLanes<8, 1>)   \
  instantiate_types(name "_simd16", function, InLanes<16, 1>) \
  instantiate_types(name "_simd32", function, InLanes<32, 1>) \
  instantiate_types(name "_simd32x2", function, InLanes<32, 2>) \
  instantiate_types(name "_simd32x4", function, InLanes<32, 4>) \
  instantiate_types(name "_block1", function, InThreadgroup<1>) \
  instantiate_types(name "_block2", function, InThreadgroup<2>) \
  instantiate_types(name "_block4", function, InThreadgroup<4>) \
  instantiate_types(name "_looped", function, Looped<looped_packs(is_nvidia)>) \
  instantiate_types(name "_split_sums", function, SplitSums) \
  instantiate_types(name "_split_write", function, SplitWrite)
