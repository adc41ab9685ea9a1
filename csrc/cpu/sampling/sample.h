// Tokens drawn from logits on the CPU; metal/sampling/sample.metal says which.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

struct SampleFilters {
  uint32_t top_k;  // 0 keeps all
  uint32_t top_p;  // in units of 2^-32; 0 keeps all
  bool has_min_p;
  float log_min_p;  // rounded to the type of the logits

  bool any() const {
    return top_k > 0 || top_p > 0 || has_min_p;
  }
};

struct SampleOptions {
  SampleFilters filters;
  float inverse_temperature;
  bool greedy;
  bool splits_key;  // whether numbers are drawn by the second half of the key's split
};

// x [rows, columns] and key [2], null where greedy -> tokens [rows], their logarithmic probabilities, or null, and all
// logarithmic probabilities [rows, columns], of x's type, or null.
void sample(Type type, const void* x, const uint32_t* key, uint32_t* tokens, float* logprobs, void* all, size_t rows,
            size_t columns, const SampleOptions& options);

}  // namespace mittens::cpu
