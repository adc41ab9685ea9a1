// Keys and values of 4 and 8 bits, as mx.quantize packs them, as sources of rows.
#pragma once

#include "attention/attention.h"

namespace mittens {

inline uint start_of(constant TokenRows& rows, AttentionPlace place) {
  return uint(rows.start + place.batch * rows.batch + place.key_head * rows.head);
}

// The runs of a head's keys or values.
template <typename T, int bits, int E>
inline Affine<T, bits, E> head_of(
    const device uint* words, const device T* scales, const device T* biases, constant TokenRows& rows, constant TokenRows& scale_rows,
    constant TokenRows& bias_rows, uint group_shift, AttentionPlace place) {
  using Integers = typename Affine<T, bits, E>::Integers;
  constexpr int of_word = 32 / bits;
  constexpr uint runs = E < of_word ? of_word / E : 1;  // of a word
  constexpr uint words_of = E < of_word ? 1 : E / of_word;  // of a run
  return Affine<T, bits, E>{
      (const device Integers*)words,
      scales,
      biases,
      start_of(rows, place) * runs / words_of,
      uint(rows.token) * runs / words_of,
      start_of(scale_rows, place),
      uint(scale_rows.token),
      start_of(bias_rows, place),
      uint(bias_rows.token),
      group_shift};
}

}  // namespace mittens
