// Products with dense matrices of weights on the CPU, sums in float32.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

// y[i, m, n] = round(sum_k x[i, m, k] * w[i][n, k] + bias[n]) for each matrix i; not transposed w[i][k, n].
void gemv(Type type,
          const void* const* w,  // [matrices], each [outputs, columns], not transposed [columns, outputs]; rows lie in
                                 // memory as they are
          size_t weight_stride,  // elements from row to row of a matrix
          bool transpose,
          const void* x,  // [matrices, rows, columns]
          const void* bias,  // [outputs] or nullptr
          void* y,  // [matrices, rows, outputs]
          size_t matrices, size_t rows, size_t columns, size_t outputs,
          bool exact);  // up to 32 rows, each bit for bit as alone; transposed only

}  // namespace mittens::cpu
