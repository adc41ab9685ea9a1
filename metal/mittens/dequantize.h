// Integers of 4 and 8 bits, packed in 32-bit words, as floats without a conversion: an integer is masked into the
// mantissa of 2^23, which then reads as 2^23 + integer * 2^(its lowest bit). Taking 2^23 off is exact; where the
// integer stands high it may instead be taken off a whole sum. The power of two goes to the activations.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace mittens {

enum Format {
  affine4,  // integers from the lowest bit up, neighbours next to each other
  affine8,
};

template <Format F>
constexpr int bits_of() {
  return F == affine4 ? 4 : 8;
}

// Integers in a word.
template <Format F>
constexpr int word_size() {
  return 32 / bits_of<F>();
}

// The middle of the integers, which all are taken from: it is near the zero of weights that have both signs, so that
// sums do not grow large only to cancel.
template <Format F>
constexpr int zero_of() {
  return 1 << (bits_of<F>() - 1);
}

// The column, from the first of a word's run of words on, that integer i of the word belongs to.
template <Format F>
constexpr int packed_column(int word, int i) {
  return word * word_size<F>() + i;
}

// The bit at which integer i stands when it is taken out: the upper ones of 4 bits after a shift by 9, so that the
// highest ends below bit 23. One shift serves a word, as it costs more than an addition on every GPU.
template <Format F>
constexpr int bit_of(int i) {
  return bits_of<F>() == 8 ? 8 * (i % 2) : i < 5 ? 4 * i : 4 * i - 9;
}

// What 2^23 + integer * 2^bit reads as for the middle integer.
template <Format F>
constexpr float origin_of(int i) {
  return float((1 << 23) + (zero_of<F>() << bit_of<F>(i)));
}

// By how much unpack_word leaves integer i too large: by nothing, if exact.
template <Format F, bool exact>
constexpr float remainder_of(int i) {
  return !exact && bit_of<F>(i) >= 15 ? origin_of<F>(i) : 0.0f;
}

// What to multiply an activation by, so that it fits integer i of a word.
template <Format F>
constexpr float activation_scale(int i) {
  return 1.0f / float(1 << bit_of<F>(i));
}

// two23 is 2^23 as the bits of a float. It comes from the host: a constant that the compiler knows would cost a
// second instruction on GPUs that mask and merge in one, since that takes only one constant.
template <Format F, bool exact, int i>
inline float extract(uint word, uint two23) {
  constexpr uint mask = ((1u << bits_of<F>()) - 1) << bit_of<F>(i);
  const float placed = as_type<float>((word & mask) | two23);
  if constexpr (remainder_of<F, exact>(i) != 0.0f) {
    return placed;
  } else {
    return placed - origin_of<F>(i);
  }
}

// Integer i of a word less the middle one, as integer * 2^bit_of(i) + remainder_of(i).
template <Format F, bool exact>
inline void unpack_word(uint word, uint two23, thread float (&q)[32 / bits_of<F>()]) {
  if constexpr (bits_of<F>() == 8) {
    const uint upper = word >> 16;
    q[0] = extract<F, exact, 0>(word, two23);
    q[1] = extract<F, exact, 1>(word, two23);
    q[2] = extract<F, exact, 2>(upper, two23);
    q[3] = extract<F, exact, 3>(upper, two23);
  } else {
    const uint upper = word >> 9;
    q[0] = extract<F, exact, 0>(word, two23);
    q[1] = extract<F, exact, 1>(word, two23);
    q[2] = extract<F, exact, 2>(word, two23);
    q[3] = extract<F, exact, 3>(word, two23);
    q[4] = extract<F, exact, 4>(word, two23);
    q[5] = extract<F, exact, 5>(upper, two23);
    q[6] = extract<F, exact, 6>(upper, two23);
    q[7] = extract<F, exact, 7>(upper, two23);
  }
}

}  // namespace mittens
