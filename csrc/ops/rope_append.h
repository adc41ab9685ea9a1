// Rotary embedding of new queries and keys, and keys and values into a cache, as other ops call it.
#pragma once

#include <optional>
#include <utility>

#include "mlx/utils.h"
#include "ops/primitive.h"

namespace mittens {

// How a layer turns its heads.
struct Rotary {
  int dims = 0;  // of a head that are rotated
  std::optional<float> base;
  float scale = 1.0f;  // of positions
  std::optional<mx::array> freqs;
  std::optional<mx::array> query_norm;
  std::optional<mx::array> key_norm;
  float eps = 0.0f;  // of the norms
};

// The queries, and the buffers of keys and values with the new tokens.
struct Appended {
  mx::array queries;
  mx::array keys;
  mx::array values;
  bool in_place;  // whether a later call may update the buffers while work on them is on its way
};

// None where no kernel covers the call.
std::optional<Appended> attempt_rope_append(const mx::array& heads, const mx::array& keys, const mx::array& values,
                                            const Rotary& rotary, int offset, int start, mx::StreamOrDevice where);

// The first `end` tokens of the keys and values, for kernels of ours on the same stream: what reads them does not keep
// the buffers from being updated in place.
std::pair<mx::array, mx::array> seen_by_kernels(const Appended& appended, int end);

}  // namespace mittens
