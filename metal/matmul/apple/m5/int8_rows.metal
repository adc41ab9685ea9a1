// Rounds rows of x to integers of 8 bits for matmul/apple/m5/qmm_int8.metal:
//
//   x[m, k] = scales[m, k / group].x * integers[m, k]
//
// scales[m, g].y is the sum of a group's integers. In each eight columns the even places come first, as qmm_int8
// unpacks its weights. A group with an infinite element keeps its signs, and a group with NaN has NaN for its scale, so
// that results are not finite where x is not. Rows from `rows` to `padded_rows` are zeros.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

namespace mittens {

// An integer of at most 127 for an element of a group whose largest has these bits, without its sign.
inline int int8_of(float element, float inverse, bool is_finite) {
  if (is_finite) {
    return int(rint(element * inverse));
  }
  return isinf(element) ? (element > 0 ? 1 : -1) : 0;
}

}  // namespace mittens

template <typename T, int group_size>
[[kernel, max_total_threads_per_threadgroup(kInt8RowThreads)]] void int8_rows(
    const device T* x [[buffer(0)]],       // [rows, columns]
    device uint2* integers [[buffer(1)]],  // [padded_rows, columns / 8]
    device float2* scales [[buffer(2)]],   // [columns / group_size, padded_rows]
    constant Int8Params& params [[buffer(3)]], uint3 group [[threadgroup_position_in_grid]],
    uint thread_at [[thread_index_in_threadgroup]]) {
  constexpr int own = 8;                      // columns of a thread
  constexpr int of_group = group_size / own;  // threads
  constexpr float smallest = 0x1p-119f;       // whose inverse is a float that GPUs do not flush
  const uint row = group.y;
  const uint at = group.x * kInt8RowThreads + thread_at;
  const bool is_there = own * at < params.columns;
  float elements[own] = {};
  if (is_there && row < params.rows) {
    const device vec<T, 4>* from = (const device vec<T, 4>*)(x + size_t(row) * params.columns + own * at);
#pragma unroll
    for (int i = 0; i < own; ++i) {
      elements[i] = float(from[i / 4][i % 4]);
    }
  }
  // Bits of floats without their signs are in the order of their sizes, and NaN is beyond infinity.
  uint most = 0;
#pragma unroll
  for (int i = 0; i < own; ++i) {
    most = max(most, as_type<uint>(elements[i]) & 0x7fffffffu);
  }
#pragma unroll
  for (ushort step = 1; step < of_group; step *= 2) {
    most = max(most, simd_shuffle_xor(most, step));
  }
  const float largest = as_type<float>(most);
  const bool is_finite = most < 0x7f800000u;
  const bool is_zero = is_finite && largest < smallest;
  const float inverse = is_finite && !is_zero ? 127.0f / largest : 0.0f;
  int sum = 0;
  uint packed[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < own; ++i) {
    const int integer = int8_of(elements[i], inverse, is_finite);
    sum += integer;
    packed[i % 2] |= (uint(integer) & 0xffu) << (i / 2 * 8);
  }
#pragma unroll
  for (ushort step = 1; step < of_group; step *= 2) {
    sum += simd_shuffle_xor(sum, step);
  }
  if (is_there) {
    integers[size_t(row) * (params.columns / own) + at] = uint2(packed[0], packed[1]);
    if (at % of_group == 0) {
      const float scale = is_zero ? 0.0f : is_finite ? largest * (1.0f / 127.0f) : largest;
      scales[size_t(at / of_group) * params.padded_rows + row] = float2(scale, float(sum));
    }
  }
}

instantiate_types("quantized_matmul_int8_rows_32", int8_rows, 32)
instantiate_types("quantized_matmul_int8_rows_64", int8_rows, 64)
instantiate_types("quantized_matmul_int8_rows_128", int8_rows, 128)
