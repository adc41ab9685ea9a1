// Rows of weights as they are, as a source of products by tiles.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace mittens {

// A matrix of bfloat whose rows begin on 16 bytes.
struct DenseRows {
  struct Values {
    static constant constexpr int size = 8;
    struct Words {
      uint4 at;
    };
  };
  static constant constexpr bool has_bias = false;
  static constant constexpr bool fits_half = false;
  struct Run {
    typename Values::Words words;
  };
  const device bfloat* w;
  uint stride;  // elements from row to row

  // Columns [column, column + 8) of a row; column is a multiple of 8.
  Run load(uint row, uint column) const {
    return load(row, 0, column);
  }

  // The same of row + more, where all lanes have the same `more`.
  Run load(uint row, uint more, uint column) const {
    Run run;
    run.words.at = *(const device uint4*)(w + (row * stride + more * stride + column));
    return run;
  }

  static float element(Run run, int i) {
    const uint word = run.words.at[i / 2];
    return as_type<float>(i % 2 ? word & 0xffff0000u : word << 16);
  }
};

}  // namespace mittens
