// A mixture's choice of experts on the CPU.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

// chosen: the softmax of the chosen logits alone; sqrtsoftplus: sqrt(log(1 + exp(logits))).
enum class Scores { softmax, sigmoid, chosen, sqrtsoftplus };

struct Route {
  Scores scores;
  bool renormalize;
  bool descending;
  float scale;
  bool precise;
  float eps;
  int groups;
  int kept;
  float dropped;
};

// For each row of logits the experts of the k largest round(scores) + bias, unrounded where precise, and their weights:
// scale * scores, without the bias, divided by their sum where they are renormalized. In descending order, the first of
// equals first; or in ascending order, the last of equals last. NaN counts as the least in descending order, as the
// largest in ascending. Keys of all but the `kept` groups with the largest sums of two keys are `dropped`.
void route_top_k(Type type,  // of logits and weights
                 const Route& route,
                 const void* logits,  // [rows, experts]
                 const float* bias,  // [experts] or nullptr
                 uint32_t* indices,  // [rows, k]
                 void* weights,  // [rows, k]
                 size_t rows, size_t experts, size_t k);

}  // namespace mittens::cpu
