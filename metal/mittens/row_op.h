// Ops along rows: norms, softmax and the like. An op says what it computes; each schedule is written once, here.
//
// An op is a struct of its arrays and numbers:
//
//   rows[inputs]      arrays [rows, columns]; packs of 16 bytes are aligned to the first one's rows, and elements
//                     before and behind them are edges (row_io.h)
//   columns[weights]  arrays [columns]; each may be absent
//   y                 the result [rows, columns]
//
// and four functions, with the types and numbers that they need (rms_norm.h is an example):
//
//   none    the Stat of zero elements, if reduces is 1; fill is the value of elements outside of a row
//   of      Stat of one thread's elements of a row
//   done    Row, the numbers that writing needs, from the Stat of all elements
//   write   v[0][i], an element of the result, from inputs v[k][i] and weights w[c][i]; it is
//           called with packs and with single elements
//
// A Stat is a sum, or a struct with functions of its own, for results of type T: merge<T> joins two Stats; across<T, L>
// joins the Stats of L lanes and gives each lane the result; write_stat and read_stat move one to memory and back, as
// `numbers` floats. An op with reduces 0 only writes.
//
// The result of one op may be the input of the next: run_rows takes two. The result of `first` is written to memory
// too, and is not read back if the row stays in registers.
//
// To add an op: its struct, and a kernel that hands it on to a schedule (norm/rms_norm.metal); instantiate_rows names
// its variants as the table of schedules in csrc/ops/norm/plan.h does. RowPrimitive::row_launches binds arguments in
// the order of rows, weights, results, partials, params. Only split rows use partials: `numbers` floats for each part
// of a row.
#pragma once

#include "mittens/instantiate.h"
#include "mittens/reduce.h"
#include "mittens/row_io.h"
#include "params/norm.h"
#include "mittens/row_schedules.h"
#include "mittens/row_parts.h"
#include "mittens/row_write.h"

namespace mittens {

// The threads that share a row: here L lanes of a simdgroup.
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

// A threadgroup. Each op has its part of the scratch, [32 * numbers], uses it once, and so needs one barrier.
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

  // The team of the next op, with a part of the scratch of its own.
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
    First first, Team team, uint columns, Op op, RowPlace place, RowBatch batch, thread const PartsOf<First, N>& parts,
    thread const WeightParts<First, N>& weights) {
  typename First::Row terms = typename First::Row();
  if constexpr (First::reduces) {
    terms = first.done(team.all(first, first.of(parts, batch)), columns);
  }
  return rewrite_parts<N>(first, terms, Op::fill, place, batch, parts, weights);
}

// The op that loads from memory: `first` if there is one, else `op`.
template <typename First, typename Op>
inline First lead_of(First first, Op) {
  return first;
}

template <typename Op>
inline Op lead_of(NoOp, Op op) {
  return op;
}

// Runs the ops on a row that stays in registers.
template <int N, typename First, typename Op, typename Team>
inline void row_held(First first, Op op, Team team, constant RowParams& params, uint row, bool whole) {
  const auto lead = lead_of(first, op);
  using Lead = decltype(lead_of(first, op));
  // If weights would take registers that the row needs, they are loaded behind the thread's own sum.
  constexpr bool late = Op::reduces && (Op::weights > 1 || (!is_same_v<First, NoOp> && N > 2));
  const RowPlace place = row_place<typename Op::Element>(lead.rows[0].phase, row, params, whole);
  const RowBatch batch = RowBatch{team.t, team.stride, place.span.packs, team.t, !whole && team.t < place.span.edges};
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
    InThreadgroup<N>, First first, Op op, constant RowParams& params, RowThread thread_of, threadgroup float* scratch,
    device float* = nullptr) {
  const ThreadgroupTeam team = threadgroup_team(params, thread_of, scratch);
  if (params.whole) {
    row_held<N>(first, op, team, params, thread_of.group, true);
  } else {
    row_held<N>(first, op, team, params, thread_of.group, false);
  }
}

template <int N, int Threads, typename First, typename Op>
inline void run_rows(
    Looped<N, Threads>, First first, Op op, constant RowParams& params, RowThread thread_of, threadgroup float* scratch,
    device float* = nullptr) {
  const auto lead = lead_of(first, op);
  const RowPlace place = row_place<typename Op::Element>(lead.rows[0].phase, thread_of.group, params, false);
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
  team.columns = 0;  // a threadgroup sees a part; SplitWrite has the whole row
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

// Kernels of the table of schedules in csrc/ops/norm/plan.h but block8, which only layer_norm has, one for each element
// type. `function` takes the element type and the schedule.
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
