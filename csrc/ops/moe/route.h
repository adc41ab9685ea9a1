// A router's choice of experts, which is an op of its own, and a part of mixtures.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "cpu/moe/route_top_k.h"
#include "mlx/array.h"
#include "params/moe.h"
#include "runtime/primitive.h"

namespace mittens {

// A caller's options for the choice of experts.
struct RouteOptions {
  int k;
  const std::string& scores;
  bool renormalize;
  bool descending;
  float scale;
  bool precise;
  float eps;
  std::optional<std::pair<int, int>> groups;
  float dropped;
};

struct Routing {
  int k;
  cpu::Scores scores;
  bool renormalize;
  bool descending;
  float scale;
  bool precise;  // whether experts are chosen by scores in float32
  float eps;  // that is added to the sum of renormalized weights
  int groups;  // of experts
  int kept;  // groups whose experts may be chosen by their keys
  float dropped;  // the key of the others

  bool operator==(const Routing&) const = default;
};

// Throws, naming `op`, unless scores is known, k is at least 1 and at most the number of experts, a bias has an element
// for each expert, and groups have as many experts each.
Routing checked_routing(const char* op, int experts, const char* bias_name, const std::optional<mx::array>& bias,
                        const RouteOptions& choice);

// Whether kernels hold the scores, and scores of groups.
bool has_route_kernel(int experts, const Routing& routing, mx::Stream stream);

RouteParams route_params(const Routing& routing, int experts, bool has_bias);

// Indices and weights [.., k] of logits [.., experts], and of a bias [experts] in float32: by one primitive where that
// has a kernel or native code, else by mx.
std::pair<mx::array, mx::array> chosen_experts(const mx::array& logits, const std::optional<mx::array>& bias,
                                               const Routing& routing, mx::Stream stream);

}  // namespace mittens
