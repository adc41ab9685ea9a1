// A row as the kernels take it: packs of 16 bytes that start on a 16-byte boundary, and the few single elements at the
// row's two ends (none where the columns fill packs). Packs go round the threads of a row, neighbours to neighbours;
// thread i also holds edge element i. So any number of columns is read and written in 16-byte pieces.
#pragma once

#include "mittens/pack.h"

namespace mittens {

struct RowSpan {
  uint head;   // single elements before the first pack
  uint packs;
  uint edges;  // single elements at both ends: fewer than two packs' worth
};

// phase: elements between the last 16-byte boundary and the row's start. A whole row is known to start on one and to
// fill packs.
template <typename T, bool Whole = false>
inline RowSpan row_span(uint phase, uint columns) {
  constexpr uint W = pack_size<T>();
  RowSpan span;
  if (Whole) {
    span.head = 0;
    span.packs = columns / W;
    span.edges = 0;
    return span;
  }
  span.head = min((W - phase % W) % W, columns);
  span.packs = (columns - span.head) / W;
  span.edges = columns - span.packs * W;
  return span;
}

// The column of edge element i.
template <typename T>
inline uint edge_column(RowSpan span, uint i) {
  return i < span.head ? i : i + span.packs * pack_size<T>();
}

// Whether the packs of a row are on 16-byte boundaries in an array whose row starts at this phase.
template <typename T, bool Whole = false>
inline bool packs_aligned(uint phase, RowSpan span) {
  return Whole || (phase + span.head) % pack_size<T>() == 0;
}

// What one thread holds of a row: the packs first, first + stride, ... below end, and one edge element.
template <typename T, int N>
struct RowPart {
  uint4 packs[N];
  T edge;
};

template <typename T, int N>
inline void clear(thread RowPart<T, N>& part) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    part.packs[i] = uint4(0);
  }
  part.edge = T(0);
}

template <typename T, int N>
inline void load_packs(
    const device T* row, RowSpan span, bool aligned, uint first, uint stride, uint end, uint4 fill,
    thread RowPart<T, N>& part) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint p = first + i * stride;
    part.packs[i] = p < end ? load_pack(row + span.head + p * pack_size<T>(), aligned) : fill;
  }
}

template <typename T, int N>
inline void store_packs(
    device T* row, RowSpan span, bool aligned, uint first, uint stride, uint end, thread const RowPart<T, N>& part) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint p = first + i * stride;
    if (p < end) {
      store_pack(row + span.head + p * pack_size<T>(), aligned, part.packs[i]);
    }
  }
}

// The edge element of this thread, or fill.
template <typename T>
inline T load_edge(const device T* row, RowSpan span, uint thread_index, float fill) {
  return thread_index < span.edges ? row[edge_column<T>(span, thread_index)] : T(fill);
}

template <typename T>
inline void store_edge(device T* row, RowSpan span, uint thread_index, float v) {
  if (thread_index < span.edges) {
    row[edge_column<T>(span, thread_index)] = T(v);
  }
}

}  // namespace mittens
