// Reductions over the lanes that share a row and over a threadgroup. Every thread gets the result.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace mittens {

// A simdgroup holds 32 / L rows, each in L neighbouring lanes. All 32 lanes take part.
template <int L>
inline float lanes_sum(float v) {
  if constexpr (L == 32) {
    return simd_sum(v);
  } else {
#pragma unroll
    for (ushort mask = L / 2; mask > 0; mask /= 2) {
      v += simd_shuffle_xor(v, mask);
    }
    return v;
  }
}

template <int L>
inline float lanes_max(float v) {
  if constexpr (L == 32) {
    return simd_max(v);
  } else {
#pragma unroll
    for (ushort mask = L / 2; mask > 0; mask /= 2) {
      v = max(v, simd_shuffle_xor(v, mask));
    }
    return v;
  }
}

// Where a thread stands in its threadgroup, as the reductions need it.
struct ThreadPosition {
  uint lane;
  uint simdgroup;
  uint simdgroups;
};

// Statistics that are sums, as mittens/row_op.h asks for them: of two sets of elements, and across the L lanes that
// share a row.
template <typename T>
inline float merge(float a, float b) {
  return a + b;
}

template <typename T>
inline float2 merge(float2 a, float2 b) {
  return a + b;
}

template <typename T, int L>
inline float across(float own, uint, float) {
  return lanes_sum<L>(own);
}

template <typename T, int L>
inline float2 across(float2 own, uint, float) {
  return float2(lanes_sum<L>(own.x), lanes_sum<L>(own.y));
}

// Moved to memory and back.
template <typename P>
inline void write_stat(P p, float v) {
  p[0] = v;
}

template <typename P>
inline void read_stat(P p, thread float& v) {
  v = p[0];
}

template <typename P>
inline void write_stat(P p, float2 v) {
  p[0] = v.x;
  p[1] = v.y;
}

template <typename P>
inline void read_stat(P p, thread float2& v) {
  v = float2(p[0], p[1]);
}

// One barrier: each simdgroup leaves its sum in scratch[32], then every simdgroup adds them in the same order.
// A scratch may serve again only after another barrier.
inline float threadgroup_sum(float v, threadgroup float* scratch, ThreadPosition position) {
  v = simd_sum(v);
  if (position.lane == 0) {
    scratch[position.simdgroup] = v;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_sum(position.lane < position.simdgroups ? scratch[position.lane] : 0.0f);
}

}  // namespace mittens
