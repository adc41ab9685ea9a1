// GGUF blocks from weights in q4_0 and q8_0, and weights from blocks of every kind (mittens/source/gguf.h). A simdgroup
// makes a block, a lane for each weight. A thread unpacks kDequantizedColumns weights, each rounded once.
//
// q4_0: d = m / -8, m the weight of largest magnitude (the first of equals), q = min(15, floor(w / d + 8.5)).
// q8_0: d = max |w| / 127, q = w / d rounded to nearest, halves away from zero.
// Every step rounds as in the gguf package, so that the bytes are the same. A NaN makes d NaN, as there, and with it
// the block. Where w / d is no finite number, q is 0: the package's conversion is undefined there. (GPUs that take
// subnormal numbers for zero may round d to 0, as its half would be.)
#include <metal_stdlib>

#include "matmul/row_products.h"
#include "mittens/instantiate.h"
#include "mittens/pack.h"
#include "mittens/source/gguf.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

constant constexpr uint block_weights = 32;

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

constant constexpr uint smallest_nan = 0x7f800001;  // as bits, larger than any number's

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

template <typename T, BlockKind kind>
[[kernel, max_total_threads_per_threadgroup(256)]] void block_quantize(
    const device T* w [[buffer(0)]],     // [count, 32]
    device uchar* blocks [[buffer(1)]],  // [count, bytes of a block]
    constant BlockCountParams& params [[buffer(2)]], uint group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint block = group * simdgroups + simdgroup;
  if (block >= params.count) {
    return;
  }
  const float v = float(w[size_t(block) * block_weights + lane]);
  const uint largest = largest_bits(v);
  if constexpr (kind == q4_0) {
    const uint first = simd_min(magnitude_bits(v) >= min(largest, smallest_nan) ? lane : 31u);
    const float d = simd_shuffle(v, ushort(first)) / -8.0f;
    const float scaled = product(v, inverse(d));
    const uint q = is_number(scaled) ? uint(clamp(trunc(scaled + 8.5f), 0.0f, 15.0f)) : 0u;
    const uint upper = simd_shuffle_xor(q, ushort(16));
    device uchar* out = blocks + size_t(block) * 18;
    if (lane < 16) {
      out[2 + lane] = uchar(q | (upper << 4));
    } else if (lane == 16) {
      store_half(out, d);
    }
  } else {
    const float d = largest < smallest_nan ? as_type<float>(largest) / 127.0f : NAN;
    const float scaled = product(v, inverse(d));
    const float whole = floor(abs(scaled));
    const float rounded = is_number(scaled) ? whole + floor(2.0f * (abs(scaled) - whole)) : 0.0f;
    device uchar* out = blocks + size_t(block) * 34;
    out[2 + lane] = uchar(int(scaled < 0 ? -rounded : rounded) & 0xff);
    if (lane == 0) {
      store_half(out, d);
    }
  }
}

// Columns [at, at + 16) of a block, in any of the kinds: one kernel, since there is nothing to it but its loads.
template <typename T, BlockKind kind>
inline void dequantize_run(const device uchar* blocks, device T* w, uint run) {
  using Rows = BlockRows<kind, kDequantizedColumns>;
  constexpr uint runs = Rows::Block::Shape::weights / kDequantizedColumns;
  const Rows all = {blocks, Rows::Block::Shape::bytes, 0};
  const Rows from = all.at(run / runs, true);
  const typename Rows::Run loaded = from.load(0, 0, run % runs * kDequantizedColumns);
  half q[kDequantizedColumns];
  Rows::Values::unpack(loaded.words, q);
  constexpr int W = pack_size<T>();
#pragma unroll
  for (int i = 0; i < kDequantizedColumns / W; ++i) {
    float v[W];
#pragma unroll
    for (int j = 0; j < W; ++j) {
      v[j] = run_weight<Rows>(loaded, q[i * W + j], i * W + j);
    }
    ((device uint4*)w)[size_t(run) * (kDequantizedColumns / W) + i] = pack<T>(v);
  }
}

#define dequantize_case(kind)               \
  case kind:                                \
    dequantize_run<T, kind>(blocks, w, at); \
    break;

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void block_dequantize(
    const device uchar* blocks [[buffer(0)]],  // [count, bytes of a block]
    device T* w [[buffer(1)]],                 // [count, weights of a block]
    constant DequantizeParams& params [[buffer(2)]], uint at [[thread_position_in_grid]]) {
  if (at >= params.runs) {
    return;
  }
  switch (params.kind) {
    each_block_kind(dequantize_case)
    default:
      break;
  }
}

instantiate_types("block_dequantize", block_dequantize)
instantiate_types("block_quantize_q4_0", block_quantize, q4_0)
instantiate_types("block_quantize_q8_0", block_quantize, q8_0)
