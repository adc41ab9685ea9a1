// Products of 1 or 4 rows of x with GGUF blocks as a .gguf file stores them (mittens/source/gguf.h):
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n]
//
// matmul/row_products.h says how: a simdgroup has kRowOutputs outputs. Simdgroups of a threadgroup's first dimension
// share the columns; along its second they have outputs of their own.
#include <metal_stdlib>

#include "matmul/row_products.h"
#include "mittens/instantiate.h"
#include "mittens/source/gguf.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

template <typename T, BlockKind kind, int M>
[[kernel, max_total_threads_per_threadgroup(256)]] void block_matmul(
    const device T* x [[buffer(0)]],           // [rows, columns]
    const device uchar* blocks [[buffer(1)]],  // [outputs, row_bytes]
    const device T* bias [[buffer(2)]],        // [outputs]
    device T* y [[buffer(3)]],                 // [rows, outputs]
    constant BlocksParams& params [[buffer(4)]], thread_of_plane) {
  threadgroup float partials[kProductSimdgroups * kRowOutputs * M];
  const Sharing at = {thread_at.x, threads.x / 32, thread_at.y, lane};
  const uint first_row = group.y * M;
  const RowsOfX<T> rows = {x + size_t(first_row) * params.columns, params.columns, params.rows - first_row};
  const BlockRows<kind, kRunColumns> matrix[1] = {{blocks, params.row_bytes, 0}};
  const uint block = group.x * threads.y + thread_at.y;
  multiply_by_rows<M, kRowOutputs>(rows, matrix, bias, y, first_row, block, params, at, partials);
}

instantiate_kinds("block_matmul", "_1", block_matmul, 1)
// Other kinds have one row at a time.
instantiate_common_kinds("block_matmul", "_4", block_matmul, 4)
