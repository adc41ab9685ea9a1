// Copies a strided view into row contiguous memory:
//
//   target[r, c] = source[start + sum_d index_d(r) * strides[d] + c * column_stride]
//
// for arrays that other kernels read in rows. Threads go along the columns; a threadgroup takes a chunk of one row.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "params/runtime.h"

using namespace metal;
using namespace mittens;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void copy_strided(
    const device T* source [[buffer(0)]],
    device T* target [[buffer(1)]],  // [rows, columns]
    constant CopyParams& params [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  const uint row = group / params.chunks;
  const uint column = group % params.chunks * threads + t;
  if (column >= params.columns) {
    return;
  }
  int64_t at = params.start + int64_t(column) * params.column_stride;
  uint rest = row;
  for (uint d = params.dims; d > 0; --d) {
    at += int64_t(rest % params.shape[d - 1]) * params.strides[d - 1];
    rest /= params.shape[d - 1];
  }
  target[size_t(row) * params.columns + column] = source[at];
}

instantiate_kernel("copy_strided_1", copy_strided, uchar)
instantiate_kernel("copy_strided_2", copy_strided, ushort)
instantiate_kernel("copy_strided_4", copy_strided, uint)
