// Rows of weights as they are, as a source of products by tiles.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace mittens {

// A matrix whose rows begin on 16 bytes.
template <typename T>
struct DenseRows {
  struct Values {
    static constant constexpr int size = 16 / sizeof(T);
    struct Words {
      uint4 at;
    };
  };
  static constant constexpr bool has_bias = false;
  static constant constexpr bool fits_half = is_same_v<T, half>;
  struct Run {
    typename Values::Words words;
  };
  const device T* w;
  uint stride;  // elements from row to row

  // A run of columns of a row; column is a multiple of its size.
  Run load(uint row, uint column) const {
    return load(row, 0, column);
  }

  // The same of row + more, where all lanes have the same `more`.
  Run load(uint row, uint more, uint column) const {
    Run run;
    run.words.at = *(const device uint4*)(w + (row * stride + more * stride + column));
    return run;
  }

  // As products take it: bfloat is widened.
  static conditional_t<is_same_v<T, half>, half, float> element(Run run, int i) {
    if constexpr (is_same_v<T, float>) {
      return as_type<float>(run.words.at[i]);
    } else if constexpr (is_same_v<T, half>) {
      return as_type<half2>(run.words.at[i / 2])[i % 2];
    } else {
      const uint word = run.words.at[i / 2];
      return as_type<float>(i % 2 ? word & 0xffff0000u : word << 16);
    }
  }
};

}  // namespace mittens
