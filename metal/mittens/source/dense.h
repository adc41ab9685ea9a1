// Rows of elements as they are.
#pragma once

#include "mittens/source.h"
#include "mittens/tile.h"

namespace mittens {

// Rows that begin on whole loads. E: columns of a run, which is one load of 2 to 16 bytes or several of 16.
template <typename T, int E = 16 / sizeof(T)>
struct Dense {
  using Operand = typename OperandOf<T>::type;
  struct Values {
    static constant constexpr int size = E;
  };
  static constant constexpr bool has_bias = false;
  static constant constexpr bool fits_half = is_same_v<T, half>;
  static constant constexpr int of_load = E * sizeof(T) > 16 ? 16 / sizeof(T) : E;  // columns
  static constant constexpr int loads = E / of_load;
  using Load = typename Words<of_load * sizeof(T)>::type;
  struct Run {
    Load at[loads];
  };
  const device Load* from;
  uint start;   // loads
  uint stride;  // loads from row to row

  Run at(uint index) const {
    Run run;
#pragma unroll
    for (int i = 0; i < loads; ++i) {
      run.at[i] = from[index + i];
    }
    return run;
  }

  Run load(uint row, uint part) const {
    return at(start + row * stride + part * loads);
  }

  Run load(uint row, uint more, uint column) const {
    return at(start + row * stride + more * stride + column / of_load);
  }

  static uint word_at(Run run, int word) {
    constexpr int each = of_load * sizeof(T) / 4;
    return word_of(run.at[word / each], word % each);
  }

  // Element i as it is in memory.
  static T value(Run run, int i) {
    if constexpr (sizeof(T) == 4) {
      return as_type<T>(word_of(run.at[i / of_load], i % of_load));
    } else {
      return as_type<vec<T, 2>>(word_of(run.at[i / of_load], i % of_load / 2))[i % 2];
    }
  }

  static Operand element(Run run, int i) {
    if constexpr (is_same_v<T, Operand>) {
      return value(run, i);
    } else {
      const uint word = word_of(run.at[i / of_load], i % of_load / 2);
      return as_type<float>(i % 2 ? word & 0xffff0000u : word << 16);
    }
  }

  // Pair t of a run, by the rule of columns that meet by pairs (mittens/tile.h).
  template <int apart>
  static vec<T, 2> pair(Run run, int t) {
    const int first = first_of_pair<apart>(t);
    const int second = second_of_pair<apart>(t);
    return element_of_both<T>(word_at(run, element_word<T>(first)), word_at(run, element_word<T>(second)), t);
  }

  // A matrix whose rows are `stride` elements from each other.
  static Dense of(const device T* w, uint stride) {
    return {(const device Load*)w, 0, stride / of_load};
  }
};

template <typename Source>
struct IsDense {
  static constant constexpr bool value = false;
};
template <typename T, int E>
struct IsDense<Dense<T, E>> {
  static constant constexpr bool value = true;
};

}  // namespace mittens
