// Where the rows of a matrix come from. A source hands out runs: neighbours of a row that a lane loads at once.
//
//   Operand               type that its elements have in products
//   size                  elements of a run
//   Run load(row, part)   run `part` of a row
//   element(run, i)
#pragma once

#include "mittens/integers.h"

namespace mittens {

// Elements of bfloat are multiplied as float where GPUs take as long for these.
template <typename T>
struct OperandOf {
  using type = T;
};
#ifndef MITTENS_NVIDIA
template <>
struct OperandOf<bfloat> {
  using type = float;
};
#endif

template <int bytes>
struct Words {
  using type = uint4;
};
template <>
struct Words<8> {
  using type = uint2;
};
template <>
struct Words<4> {
  using type = uint;
};
template <>
struct Words<2> {
  using type = ushort;
};

inline uint word_of(uint4 words, int i) {
  return words[i];
}
inline uint word_of(uint2 words, int i) {
  return words[i];
}
inline uint word_of(uint word, int) {
  return word;
}
inline uint word_of(ushort word, int) {
  return word;
}

// The longest run of at most `most` elements such that `lanes` runs side by side fill a row.
constexpr int run_size(int columns, int lanes, int most) {
  return most == 1 || columns % (lanes * most) == 0 ? most : run_size(columns, lanes, most / 2);
}

// Elements as they are. Rows start on multiples of a run.
template <typename T, int E>
struct Dense {
  using Operand = typename OperandOf<T>::type;
  using Run = typename Words<E * sizeof(T)>::type;
  static constant constexpr int size = E;
  const device Run* runs;
  uint start;   // runs
  uint stride;

  Run load(uint row, uint part) const {
    return runs[start + row * stride + part];
  }
};

template <typename T, int E>
inline typename OperandOf<T>::type element(Dense<T, E>, typename Dense<T, E>::Run run, int i) {
  using Operand = typename OperandOf<T>::type;
  if constexpr (sizeof(T) == 4) {
    return as_type<T>(word_of(run, i));
  } else if constexpr (is_same_v<T, Operand>) {
    return as_type<vec<T, 2>>(word_of(run, i / 2))[i % 2];
  } else {
    const uint word = word_of(run, i / 2);
    return as_type<float>(i % 2 ? word & 0xffff0000u : word << 16);
  }
}

// Integers of 4 or 8 bits, as mx.quantize packs them, with a scale and a bias for each group of a row.
template <typename T, int bits, int E>
struct Affine {
  using Operand = typename OperandOf<T>::type;
  using Integers = typename Words<E * bits / 8>::type;
  struct Run {
    Integers integers;
    T scale;
    T bias;
  };
  static constant constexpr int size = E;
  const device Integers* integers;
  const device T* scales;
  const device T* biases;
  uint start;   // runs
  uint stride;
  uint scales_start;
  uint scales_stride;
  uint biases_start;
  uint biases_stride;
  uint group_shift;  // a group is 1 << group_shift integers

  Run load(uint row, uint part) const {
    const uint group = part * E >> group_shift;
    return Run{
        integers[start + row * stride + part], scales[scales_start + row * scales_stride + group],
        biases[biases_start + row * biases_stride + group]};
  }
};

template <typename T, int bits, int E>
inline typename OperandOf<T>::type element(
    Affine<T, bits, E>, typename Affine<T, bits, E>::Run run, int i) {
  constexpr int integers = 32 / bits;  // of a word
  const uint word = word_of(run.integers, i / integers);
  if constexpr (is_same_v<T, half>) {
    return fma(half_integer<bits>(word, i % integers), run.scale, run.bias);
  } else {
    return typename OperandOf<T>::type(
        fma(float_integer<bits>(word, i % integers), float(run.scale), float(run.bias)));
  }
}

// Whether none of a run is infinite or NaN.
inline bool is_finite(half v) {
  return (as_type<ushort>(v) & 0x7c00u) != 0x7c00u;
}

inline bool is_finite(bfloat v) {
  return (as_type<ushort>(v) & 0x7f80u) != 0x7f80u;
}

// Not by arithmetic, which a compiler may take to have neither NaN nor infinity.
inline bool is_finite(float v) {
  return (as_type<uint>(v) & 0x7f800000u) != 0x7f800000u;
}

}  // namespace mittens
