// Products of rows with chosen matrices of a stack on the CPU: the experts of a mixture.
//
// Pairs of an input and a matrix are sorted by the matrix, so that each chosen matrix is read once for all its rows.
#pragma once

#include "cpu/matmul/quantized_matmul.h"

namespace mittens::cpu {

// Which input meets which matrix.
struct Gather {
  const uint32_t* matrices;  // [pairs], indices into the stack
  const uint32_t* inputs;  // [pairs], indices into x; nullptr: pair p has input p / pairs_per_input
  size_t pairs_per_input;
  size_t pairs;
  size_t stack;  // matrices that there are
  size_t input_count;  // inputs that there are
  size_t rows;  // of an input
  size_t columns;
  size_t outputs;
};

// y[p] = round(x[inputs[p]] times the matrix matrices[p]) for each pair, as quantized_matmul has it, and NaN where an
// index is out of range.
void gather_quantized(Type type,
                      const QuantizedWeights* stack,  // [stack]
                      const Gather& gather,
                      const void* x,  // [input_count, rows, columns]
                      void* y,  // [pairs, rows, outputs]
                      ProductMode mode);  // exact: where a matrix has up to most_exact_rows

// The same with dense matrices, as gemv has it.
void gather_dense(Type type, const void* const* stack, size_t weight_stride, bool transpose, const Gather& gather,
                  const void* x, void* y, bool exact);

// dw[e] = round(the sum over pairs p of the matrix e of dy[p]^T x[inputs[p]]), [outputs, columns]: the gradient by such
// matrices. A pair with an index out of range has no share, and a matrix without pairs has zeros.
void gather_dense_vjp(Type type, const Gather& gather,
                      const void* x,  // [input_count, rows, columns]
                      const void* dy,  // [pairs, rows, outputs]
                      void* dw);  // [stack, outputs, columns]

// gather_quantized of two stacks, as quantized_swiglu has it.
void gather_swiglu(Type type, Activation activation, const QuantizedWeights* gate, const QuantizedWeights* up,
                   const Gather& gather, const void* x, void* y, ProductMode mode);

}  // namespace mittens::cpu
