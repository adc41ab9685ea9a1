// Where the rows of a matrix come from. A source hands out runs: neighbours of a row that a lane loads at once.
//
//   Values::size                 columns of a run
//   Run load(row, more, column)  the run of row + more from `column` on, a multiple of its size. Lanes have the same `more`:
//                                one multiplication serves several rows of a lane
//   Run load(row, part)          run `part` of a row, of sources of heads
//   Operand, element(run, i)     element i of a run as products take it, of sources that need no sums of x
//
// matmul/row_products.h lists further members of sources of quantized weights.
#pragma once

#include <metal_stdlib>

using namespace metal;

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
