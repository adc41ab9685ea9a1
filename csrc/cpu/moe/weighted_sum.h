// Weighted sums of a mixture's outputs on the CPU.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

// y[s] = round(sum_i weights[s, i] * (x[s, i] + bias[matrices[s, i]])) of rows, in float32.
void weighted_sum(Type type,  // of x, bias and y
                  const void* x,  // [sums, terms, columns]
                  const void* bias,  // [.., columns] or nullptr
                  const uint32_t* matrices,  // [sums, terms]; one that is not below `stack` has no bias
                  size_t stack,
                  const void* weights,  // [sums, terms], of weights_type
                  Type weights_type,
                  void* y,  // [sums, columns]
                  size_t sums, size_t terms, size_t columns);

}  // namespace mittens::cpu
