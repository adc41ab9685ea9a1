// The columns of x that one lane multiplies weights with, held as floats while the rows of weights pass by.
//
// A lane's columns are neighbours, as its weights are, so that neighbouring lanes' columns are far apart: lanes load
// whole lines side by side instead, and exchange them through threadgroup memory of their simdgroup's own.
#pragma once

#include "mittens/integers.h"
#include "mittens/pack.h"

namespace mittens {

// V columns of M rows of x, each times its activation_scale; their plain sums; and the start of a sum of products,
// which makes up for the offset that unpack_word leaves in the weights.
template <int V, int M>
struct Activations {
  float x[M][V];
  float sum[M];
  float start[M];
};

// A lane's loads of a simdgroup's 32 * V columns of M rows: every 32nd pack.
template <typename T, int V, int M>
struct ActivationPacks {
  uint4 at[M][V / pack_size<T>()];
};

// A simdgroup's packs on their way from the lanes that loaded them to the owners of their columns, two of each owner at
// a time: more would take threadgroup memory from other simdgroups. A place is left out after every 8, so that neither
// side meets a bank more often than it must.
constant constexpr int exchanged_packs = 64;
constant constexpr int exchange_size = exchanged_packs + exchanged_packs / 8;

inline uint exchange_place(uint pack) {
  return pack + pack / 8;
}

// x [rows, columns], 16-byte aligned with a whole number of packs in V columns, from column `begin` on; rows past the
// last repeat it, columns past the last are 0: without a value there, compilers keep the one of the round before.
template <typename T, int V, int M>
inline void load_activations(
    const device T* x, uint rows, uint columns, uint begin, uint lane, thread ActivationPacks<T, V, M>& packs) {
  constexpr int W = pack_size<T>();
#pragma unroll
  for (int m = 0; m < M; ++m) {
    const device T* row = x + min(uint(m), rows - 1) * columns + (begin + lane * W);
#pragma unroll
    for (int i = 0; i < V / W; ++i) {
      packs.at[m][i] = uint4(0);
      if (lane * W + i * 32 * W < columns - begin) {
        packs.at[m][i] = load_pack(row + i * 32 * W, true);
      }
    }
  }
}

// Gives each lane the C packs of its own columns. All lanes of the simdgroup take part; `own` is its exchange. The
// packs that a lane has loaded are at the same place of their owners' C, since C divides 32: the lane tells whether it
// is their turn, and all lanes receive into the same registers.
template <int C>
inline void exchange_packs(thread uint4 (&packs)[C], uint lane, threadgroup uint4* own) {
  if constexpr (C > 1) {
    static_assert(exchanged_packs / C % 8 == 0, "the places of one lane's packs are equally far apart");
    constexpr int at_once = exchanged_packs / 32;  // of an owner
    threadgroup uint4* to = own + exchange_place(lane / C * at_once + lane % at_once);
    const threadgroup uint4* from = own + exchange_place(lane * at_once);
    uint4 taken[C];
#pragma unroll
    for (int first = 0; first < C; first += at_once) {
      simdgroup_barrier(mem_flags::mem_threadgroup);  // all lanes have read the packs before
      if (int(lane % C) / at_once == first / at_once) {
#pragma unroll
        for (int i = 0; i < C; ++i) {
          to[i * exchange_place(exchanged_packs / C)] = packs[i];
        }
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        taken[first + i] = from[i];
      }
    }
#pragma unroll
    for (int i = 0; i < C; ++i) {
      packs[i] = taken[i];
    }
  }
}

template <typename T, int bits, bool exact, int V, int M>
inline void take_activations(
    thread ActivationPacks<T, V, M>& packs, uint lane, threadgroup uint4* own, thread Activations<V, M>& a) {
  constexpr int W = pack_size<T>();
  constexpr int N = 32 / bits;
#pragma unroll
  for (int m = 0; m < M; ++m) {
    exchange_packs(packs.at[m], lane, own);
    a.sum[m] = 0;
#pragma unroll
    for (int i = 0; i < V; i += W) {
      float v[W];
      unpack<T>(packs.at[m][i / W], v);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        a.x[m][i + j] = v[j];
        a.sum[m] += v[j];
      }
    }
    a.start[m] = 0;
#pragma unroll
    for (int p = 0; p < V / N; ++p) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        a.x[m][p * N + i] *= activation_scale<bits>(i);
        a.start[m] -= remainder_of<bits, exact>(i) * a.x[m][p * N + i];
      }
    }
  }
}

}  // namespace mittens
