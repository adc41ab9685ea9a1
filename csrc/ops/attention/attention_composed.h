// Attention and its gradients in mx operations, some queries at a time, so that the scores of a long sequence are never
// all there.
#pragma once

#include <optional>
#include <vector>

#include "ops/attention/attention_launch.h"
#include "runtime/primitive.h"

namespace mittens {

// The arrays of a call, keys and values not packed.
struct DenseAttention {
  mx::array queries;
  mx::array keys;
  mx::array values;
  std::optional<mx::array> mask;
  std::optional<mx::array> sinks;
  AttentionOptions options;
};

mx::array composed_attention(const DenseAttention& call, mx::Stream stream);

// Gradients with respect to queries, keys, values, mask and sinks, as far as they were asked for.
struct AttentionGradients {
  std::optional<mx::array> queries;
  std::optional<mx::array> keys;
  std::optional<mx::array> values;
  std::optional<mx::array> mask;
  std::optional<mx::array> sinks;
};
struct WantedGradients {
  bool queries = false;
  bool keys = false;
  bool values = false;
  bool mask = false;
  bool sinks = false;

  bool operator==(const WantedGradients&) const = default;
};

AttentionGradients attention_gradients(const DenseAttention& call, const mx::array& cotangent,
                                       const WantedGradients& wanted, mx::Stream stream);

}  // namespace mittens
