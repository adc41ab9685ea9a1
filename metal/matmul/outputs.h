// Lanes along the outputs: where weights are [columns of x, outputs], each lane owns W neighbouring outputs and rows
// of weights are dealt to the lanes and simdgroups that are left over.
#pragma once

#include "matmul/splitk.h"
#include "params/matmul.h"

namespace mittens {

struct OutputLanes {
  uint lanes;  // along the outputs: a power of two
  uint lane;   // of the simdgroup
  uint simdgroup;
};

// Which of the threadgroup's workers on the same outputs a thread is, and how many there are.
inline uint worker_of(OutputLanes at) {
  return at.simdgroup * (32 / at.lanes) + at.lane / at.lanes;
}

inline uint workers_of(OutputLanes at) {
  return kOutputSimdgroups * (32 / at.lanes);
}

// Adds up the workers' sums of their W outputs; thread i of the first lanes * W (at most 256) gets output i of the
// threadgroup, the others 0. scratch [kOutputSimdgroups * 32 * W] may serve again after another barrier.
template <int W>
inline float outputs_sum(thread float (&v)[W], OutputLanes at, threadgroup float* scratch) {
  for (uint mask = 16; mask >= at.lanes; mask /= 2) {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      v[i] += simd_shuffle_xor(v[i], ushort(mask));
    }
  }
  const uint width = at.lanes * W;
  if (at.lane < at.lanes) {
#pragma unroll
    for (int i = 0; i < W; ++i) {
      scratch[at.simdgroup * width + at.lane * W + i] = v[i];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint t = at.simdgroup * 32 + at.lane;
  float sum = 0;
  if (t < width) {
    for (int s = 0; s < kOutputSimdgroups; ++s) {
      sum += scratch[s * width + t];
    }
  }
  return sum;
}

// Writes the sums of M rows, as far as y has them, from row first_row of y on. group: number of the threadgroup along
// the outputs. scratch: as of outputs_sum.
template <int W, int M, typename T>
inline void store_outputs(
    thread float (&totals)[M][W], OutputLanes at, uint group, uint outputs, uint rows, size_t first_row,
    const device T* bias, device T* y, SplitPlace place, threadgroup float* scratch) {
  const uint t = at.simdgroup * 32 + at.lane;
  const uint n = group * at.lanes * W + t;
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const float sum = outputs_sum<W>(totals[m], at, scratch);
    if (t < at.lanes * W && n < outputs && uint(m) < rows) {
      store_split(y, (first_row + m) * outputs + n, sum, bias, n, place);
    }
    if (m + 1 < M) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
}

}  // namespace mittens
