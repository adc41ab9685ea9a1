// GGUF blocks from weights, and weights from blocks: w = d * (q - zero) for 32 weights at a time, one simdgroup a
// block and one lane a weight. A block is a half d, then 16 bytes of 4-bit integers (q4_0: byte i holds integer i
// below and integer i + 16 above, zero is 8) or 32 signed bytes (q8_0).
//
// q4_0: d = m / -8, m the weight of largest magnitude (the first of equals), q = min(15, floor(w / d + 8.5)).
// q8_0: d = max |w| / 127, q = w / d rounded to nearest, halves away from zero.
// Every step rounds as in the gguf package, so that the bytes are the same. A NaN makes d NaN, as there, and with it
// the block. Where w / d is no finite number, q is 0: the package's conversion is undefined there. (GPUs that take
// subnormal numbers for zero do so with d, of which a half keeps nothing.)
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

constant constexpr uint block_weights = 32;
constant constexpr uint q4_0_bytes = 18;
constant constexpr uint q8_0_bytes = 34;

// Rounded before anything is added to it: a plain product might become part of a multiply-add.
inline float product(float a, float b) {
  return fma(a, b, 0.0f);
}

inline float inverse(float d) {
  return d == 0 ? 0.0f : 1.0f / d;
}

inline bool is_number(float v) {
  return abs(v) < INFINITY;
}

constant constexpr uint smallest_nan = 0x7f800001;  // as bits, which are larger than those of any number

// The bits of a magnitude, and of the largest in the block.
inline uint magnitude_bits(float v) {
  return as_type<uint>(v) & 0x7fffffffu;
}
inline uint largest_bits(float v) {
  return simd_max(magnitude_bits(v));
}

// Blocks that are written start on even addresses. (Two stores of a byte each came out wrong on an H200: ptxas.)
inline void store_half(device uchar* p, float v) {
  *(device half*)p = half(v);
}

inline float load_half(const device uchar* p) {
  return float(as_type<half>(ushort(p[0] | (p[1] << 8))));
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void quantize_q4_0(
    const device T* w [[buffer(0)]],       // [count, 32]
    device uchar* blocks [[buffer(1)]],    // [count, 18]
    constant BlockCountParams& params [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint block = group * simdgroups + simdgroup;
  if (block >= params.count) {
    return;
  }
  const float v = float(w[size_t(block) * block_weights + lane]);
  const uint first = simd_min(magnitude_bits(v) >= min(largest_bits(v), smallest_nan) ? lane : 31u);
  const float d = simd_shuffle(v, ushort(first)) / -8.0f;
  const float scaled = product(v, inverse(d));
  const uint q = is_number(scaled) ? uint(clamp(trunc(scaled + 8.5f), 0.0f, 15.0f)) : 0u;
  const uint upper = simd_shuffle_xor(q, ushort(16));
  device uchar* out = blocks + size_t(block) * q4_0_bytes;
  if (lane < 16) {
    out[2 + lane] = uchar(q | (upper << 4));
  } else if (lane == 16) {
    store_half(out, d);
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void quantize_q8_0(
    const device T* w [[buffer(0)]],       // [count, 32]
    device uchar* blocks [[buffer(1)]],    // [count, 34]
    constant BlockCountParams& params [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint block = group * simdgroups + simdgroup;
  if (block >= params.count) {
    return;
  }
  const float v = float(w[size_t(block) * block_weights + lane]);
  const uint largest = largest_bits(v);
  const float d = largest < smallest_nan ? as_type<float>(largest) / 127.0f : NAN;
  const float scaled = product(v, inverse(d));
  const float whole = floor(abs(scaled));
  const float rounded = is_number(scaled) ? whole + floor(2.0f * (abs(scaled) - whole)) : 0.0f;
  device uchar* out = blocks + size_t(block) * q8_0_bytes;
  out[2 + lane] = uchar(int(scaled < 0 ? -rounded : rounded) & 0xff);
  if (lane == 0) {
    store_half(out, d);
  }
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void dequantize_q4_0(
    const device uchar* blocks [[buffer(0)]],  // [count, 18]
    device T* w [[buffer(1)]],                 // [count, 32]
    constant BlockCountParams& params [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint block = group * simdgroups + simdgroup;
  if (block >= params.count) {
    return;
  }
  const device uchar* in = blocks + size_t(block) * q4_0_bytes;
  const uint byte = in[2 + lane % 16];
  const int q = int(lane < 16 ? byte & 15 : byte >> 4) - 8;
  w[size_t(block) * block_weights + lane] = T(load_half(in) * float(q));
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void dequantize_q8_0(
    const device uchar* blocks [[buffer(0)]],  // [count, 34]
    device T* w [[buffer(1)]],                 // [count, 32]
    constant BlockCountParams& params [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint block = group * simdgroups + simdgroup;
  if (block >= params.count) {
    return;
  }
  const device uchar* in = blocks + size_t(block) * q8_0_bytes;
  const int byte = in[2 + lane];
  w[size_t(block) * block_weights + lane] = T(load_half(in) * float(byte < 128 ? byte : byte - 256));
}

#define instantiate_kind(kind)                                                    \
  instantiate_kernel("block_quantize_" #kind "_float32", quantize_##kind, float)  \
  instantiate_kernel("block_quantize_" #kind "_float16", quantize_##kind, half)   \
  instantiate_kernel("block_quantize_" #kind "_bfloat16", quantize_##kind, bfloat)      \
  instantiate_kernel("block_dequantize_" #kind "_float32", dequantize_##kind, float)    \
  instantiate_kernel("block_dequantize_" #kind "_float16", dequantize_##kind, half)     \
  instantiate_kernel("block_dequantize_" #kind "_bfloat16", dequantize_##kind, bfloat)

instantiate_kind(q4_0)
instantiate_kind(q8_0)
