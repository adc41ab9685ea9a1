// Packed keys and values as operands on NVIDIA GPUs: both integers of a pair are unpacked at once, as halves, and in float16
// scaled at once. Affine does it one by one.
#pragma once

#include "attention/packed.h"
#include "mittens/operand.h"

namespace mittens {

// Rows whose runs hold scale and bias in one register.
template <typename T, int bits, int E>
struct AffinePairs {
  using Operand = T;
  using Single = Affine<T, bits, E>;
  using Values = typename Single::Values;
  struct Run {
    typename Values::Words words;
    uint affine;
  };
  Single rows;

  Run load(uint row, uint part) const {
    const typename Single::Run run = rows.load(row, part);
    return Run{run.words, as_type<uint>(vec<T, 2>(run.scale, run.bias))};
  }

  static T element(Run run, int i) {
    const vec<T, 2> affine = as_type<vec<T, 2>>(run.affine);
    return T(Single::element(typename Single::Run{run.words, affine.x, affine.y}, i));
  }
};

template <typename T, int bits, int E>
inline AffinePairs<T, bits, E> pairs_of(Affine<T, bits, E> rows) {
  return AffinePairs<T, bits, E>{rows};
}

// Elements of a run that stand at the same place of both halves of a word make a pair.
template <typename T, int bits, int E>
struct PairOrder<AffinePairs<T, bits, E>> {
  static constant constexpr int apart = 16 / bits;
};

inline half2 scaled(half2 integers, half2 scales, half2 biases) {
  return integers * scales + biases;
}

inline vec<bfloat, 2> scaled(half2 integers, vec<bfloat, 2> scales, vec<bfloat, 2> biases) {
  return vec<bfloat, 2>(
      bfloat(fma(float(integers.x), float(scales.x), float(biases.x))),
      bfloat(fma(float(integers.y), float(scales.y), float(biases.y))));
}

template <typename U, typename T, int bits, int E>
inline vec<U, 2> pair_of_row(AffinePairs<T, bits, E>, typename AffinePairs<T, bits, E>::Run run, int t) {
  constexpr int apart = 16 / bits;
  const vec<T, 2> affine = as_type<vec<T, 2>>(run.affine);
  const half2 integers = half_pair<bits>(run.words.at[t / apart], t % apart);
  return scaled(integers, vec<T, 2>(affine.x, affine.x), vec<T, 2>(affine.y, affine.y));
}

template <typename U, typename T, int bits, int E>
inline vec<U, 2> pair_of_rows(
    AffinePairs<T, bits, E>, typename AffinePairs<T, bits, E>::Run upper, typename AffinePairs<T, bits, E>::Run lower,
    int e) {
  constexpr int of_word = 32 / bits;
  constexpr int of_half = 16 / bits;
  const uint halves = side_by_side(upper.words.at[e / of_word], lower.words.at[e / of_word], e % of_word >= of_half);
  return scaled(
      half_pair<bits>(halves, e % of_half), as_type<vec<T, 2>>(side_by_side(upper.affine, lower.affine, false)),
      as_type<vec<T, 2>>(side_by_side(upper.affine, lower.affine, true)));
}

}  // namespace mittens
