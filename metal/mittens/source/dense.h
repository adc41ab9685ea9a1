// Rows of weights as they are, as a source of products by tiles.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace mittens {

// A matrix whose rows begin on 16 bytes. E: columns of a run, of 8, 16 or 32 bytes.
template <typename T, int E = 16 / sizeof(T)>
struct DenseRows {
  struct Values {
    static constant constexpr int size = E;
    static constant constexpr int words = E * sizeof(T) > 16 ? 4 : E * sizeof(T) / 4;  // of a load
    struct Words {
      vec<uint, words> at[E * sizeof(T) / 4 / words];
    };
  };
  static constant constexpr bool has_bias = false;
  static constant constexpr bool fits_half = is_same_v<T, half>;
  struct Run {
    typename Values::Words words;
  };
  const device T* w;
  uint stride;  // elements from row to row

  Run load(uint row, uint more, uint column) const {
    Run run;
    constexpr int words = Values::words;
    const device vec<uint, words>* from = (const device vec<uint, words>*)(w + (row * stride + more * stride + column));
#pragma unroll
    for (int i = 0; i < E * int(sizeof(T)) / 4 / words; ++i) {
      run.words.at[i] = from[i];
    }
    return run;
  }

  // As products take it: bfloat is widened.
  static conditional_t<is_same_v<T, half>, half, float> element(Run run, int i) {
    const int at = i * int(sizeof(T)) / 4;
    const uint word = run.words.at[at / Values::words][at % Values::words];
    if constexpr (is_same_v<T, float>) {
      return as_type<float>(word);
    } else if constexpr (is_same_v<T, half>) {
      return as_type<half2>(word)[i % 2];
    } else {
      return as_type<float>(i % 2 ? word & 0xffff0000u : word << 16);
    }
  }
};

template <typename Source>
struct IsDense {
  static constant constexpr bool value = false;
};
template <typename T, int E>
struct IsDense<DenseRows<T, E>> {
  static constant constexpr bool value = true;
};

}  // namespace mittens
