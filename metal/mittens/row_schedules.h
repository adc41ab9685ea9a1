// The schedules of ops along rows, and where a thread is in its launch (mittens/row_op.h).
#pragma once

#include "mittens/reduce.h"

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

}  // namespace mittens
