// The primitive behind mixture: two launches for tokens of chosen experts and perhaps one shared by all.
#pragma once

#include <optional>

#include "ops/matmul/activation.h"
#include "ops/matmul/quantized_weights.h"
#include "ops/matmul/normed_row.h"
#include "ops/moe/route.h"
#include "runtime/primitive.h"

namespace mittens {

// The triples of a call, each of three arrays: scales stand in for biases in modes without them. The shared expert's
// are last.
enum { kGate, kUp, kDown, kTriples, kSharedGate = kTriples, kSharedUp, kSharedDown, kAllTriples };

// The biases of an expert: of the outputs of gate, up and down.
enum { kBiases = 3 };

// Which inputs there are.
struct MixtureParts {
  QuantizedFormat format;
  Activation activation;
  Routing routing;
  bool has_shared;
  bool has_bias;
  bool has_router_bias;
  std::optional<NormOfRow> row = {};  // x is a norm, whose squares are an input
  bool has_norm = false;  // the last inputs are a residual and the weight of a norm

  bool operator==(const MixtureParts&) const = default;

  // Where they are: x, logits and triples are always there.
  static constexpr size_t logits = 1;
  static size_t triple(int i) {
    return 2 + 3 * static_cast<size_t>(i);
  }
  size_t shared_logits() const {
    return triple(kAllTriples);
  }
  size_t bias(int i) const {
    return triple(has_shared ? kAllTriples : kTriples) + (has_shared ? 1 : 0) + static_cast<size_t>(i);
  }
  size_t router_bias() const {
    return bias(has_bias ? kBiases : 0);
  }
  size_t squares() const {
    return router_bias() + (has_router_bias ? 1 : 0);
  }
  size_t residual() const {
    return squares() + (row ? 1 : 0);
  }
  mx::Dtype dtype(const Arrays& inputs) const {  // of the results
    return row ? row->dtype : inputs[0].dtype();
  }
  uint32_t places() const {  // of a token
    return static_cast<uint32_t>(routing.k) + (has_shared ? 1 : 0);
  }
};

// x [.., columns], logits [.., experts], the triples, of the shared expert with its logits [..], the biases and the
// router's -> y [.., outputs], and the arrays between the two launches: hidden [tokens, places, hidden], indices and
// weights [tokens, chosen]. With a norm y is the sum of a token and the residual; the first outputs are then as
// SummedProduct names them.
mx::array mixture_by_kernels(const MixtureParts& parts, Arrays inputs, mx::Stream stream);

// The same by an op of its own for each part, or by mx.
mx::array mixture_of_parts(const MixtureParts& parts, const Arrays& inputs, mx::Stream stream);

}  // namespace mittens
