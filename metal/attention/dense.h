// Keys and values as they are, as sources of rows.
#pragma once

#include "attention/attention.h"

namespace mittens {

// The runs of a head's keys or values.
template <typename T, int E>
inline Dense<T, E> head_of(const device T* elements, constant TokenRows& rows, AttentionPlace place, uint column) {
  constexpr int shift = E == 8 ? 3 : E == 4 ? 2 : E == 2 ? 1 : 0;
  return Dense<T, E>{
      (const device typename Words<E * sizeof(T)>::type*)elements,
      uint((rows.start + place.batch * rows.batch + place.key_head * rows.head + column) >> shift), uint(rows.token >> shift)};
}

}  // namespace mittens
