// Products with a dense matrix of weights on the CPU, sums in float32.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

// y[m, n] = round(sum_k x[m, k] * w[n, k] + bias[n]); not transposed w[k, n].
void gemv(Type type,
          const void* w,  // [outputs, columns], not transposed [columns, outputs]; rows lie in memory as they are
          size_t weight_stride,  // elements from row to row of w
          bool transpose,
          const void* x,  // [rows, columns]
          const void* bias,  // [outputs] or nullptr
          void* y,  // [rows, outputs]
          size_t rows, size_t columns, size_t outputs);

}  // namespace mittens::cpu
