// Rotary embedding of new queries and keys, and keys and values into a cache, as other ops call it.
#pragma once

#include <optional>
#include <variant>

#include "mlx/utils.h"
#include "ops/cache/cache_step.h"
#include "runtime/any_shape.h"

namespace mittens {

// How a layer turns its heads.
struct Rotary {
  int begin = 0;  // the first column that is rotated
  int dims = 0;  // of a head that are rotated
  std::optional<float> base;
  float scale = 1.0f;  // of positions
  std::optional<mx::array> freqs;
  std::optional<mx::array> query_norm;
  std::optional<mx::array> key_norm;
  std::optional<mx::array> value_norm;
  std::optional<mx::array> shared_key;  // [batch, 1, tokens, dims]: the rotated columns of all heads of keys
  float eps = 0.0f;  // of the norms
  float weight_offset = 0.0f;  // added to the norms' weights
  bool traditional = false;  // pairs are neighbours
  float query_scale = 1.0f;  // of turned queries
  float value_scale = 1.0f;  // of normed values
};

template <>
struct ArraysIn<Rotary> {
  template <typename Visitor>
  static void visit(Rotary& rotary, const Visitor& visitor) {
    for (auto* array : {&rotary.freqs, &rotary.query_norm, &rotary.key_norm, &rotary.value_norm, &rotary.shared_key}) {
      ArraysIn<std::optional<mx::array>>::visit(*array, visitor);
    }
  }
};

// The position of the first new token: of all rows of the batch, also as an array of one, or of each, [batch].
using Offset = std::variant<int, mx::array>;

// How keys and values are quantized; bits are 0 where they are not.
struct Packing {
  int group_size = 0;
  int bits = 0;

  bool operator==(const Packing&) const = default;
};

// The buffers of a cache: keys and values, or words, scales and biases of keys, then of values.
constexpr size_t buffers_of(const Packing& packing) {
  return packing.bits == 0 ? 2 : 6;
}

// Checks a call and takes it in; none where no kernel covers it, or where mx is faster by calibration.
std::optional<Append> rope_append_of(const mx::array& heads, const mx::array& keys, const mx::array& values,
                                     const Rotary& rotary, const Offset& offset, int start, mx::Stream stream);

// The same of new queries, keys and values, each [batch, heads, tokens, width] or [batch, tokens, heads * width], and
// of buffers of any kind; none where they do not fit, or where mx is faster by calibration. Values that are not to be
// quantized may have a width of their own. Keys have the columns before rotary.begin where all share the others.
std::optional<Append> rope_append_of(const mx::array& new_queries, const mx::array& new_keys,
                                     const mx::array& new_values, const Arrays& buffers, const Packing& packing,
                                     const Rotary& rotary, const Offset& offset, int start, mx::Stream stream);

// Whether mx is to turn and append new queries, keys and values, [batch, all heads, tokens, width], by calibration.
bool prefer_mx_append(const mx::Shape& heads, mx::Dtype dtype, bool has_norms, mx::Stream stream);

// Whether an append may be a step that updates its buffers in place. Not under a transformation that looks at its
// inputs, which needs an op with derivatives.
bool may_be_a_step(const Append& append);

// The queries, and the buffers with the new tokens.
CacheStep apply_rope_append(Append append);

}  // namespace mittens
