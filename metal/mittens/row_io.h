// A row as the kernels take it: packs of 16 bytes that start on a 16-byte boundary, and the few single elements at the
// row's two ends (none where the columns fill packs). Packs go round the threads of a row, neighbours to neighbours;
// thread i also holds edge element i. So any number of columns is read and written in 16-byte pieces.
#pragma once

#include "mittens/pack.h"

namespace mittens {

struct RowSpan {
  uint head;  // single elements before the first pack
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
