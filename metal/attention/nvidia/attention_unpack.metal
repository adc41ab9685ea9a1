// Unpacks keys or values of 4 and 8 bits, row by row, for attention of many queries on NVIDIA GPUs: there mx multiplies
// so fast that unpacking once takes less than unpacking for each block of queries.
#include <metal_stdlib>

#include "attention/packed.h"
#include "mittens/fragment_layout.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

template <typename T, int bits>
[[kernel, max_total_threads_per_threadgroup(kUnpackThreads)]] void attention_unpack(
    const device uint* words [[buffer(0)]],  // [batch, heads, tokens, width * bits / 32]
    const device T* scales [[buffer(1)]],    // [batch, heads, tokens, groups]
    const device T* biases [[buffer(2)]],
    device T* y [[buffer(3)]],  // [batch, heads, tokens, width]
    constant AttentionUnpackParams& params [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]]) {
  constexpr int E = kUnpacked;
  const uint runs = params.width / E;  // of a row
  const uint at = group.x * kUnpackThreads + t;
  if (at >= params.tokens * runs) {
    return;
  }
  AttentionPlace place{};
  place.batch = group.z;
  place.key_head = group.y;
  const Affine<T, bits, E> rows =
      head_of<T, bits, E>(words, scales, biases, params.words, params.scales, params.biases, params.group_shift, place);
  const typename Affine<T, bits, E>::Run run = rows.load(at / runs, at % runs);
  float values[E];
#pragma unroll
  for (int i = 0; i < E; ++i) {
    values[i] = float(rows.element(run, i));
  }
  const size_t head = size_t(group.z) * params.heads + group.y;
  store_neighbours<T, E>(y + head * params.tokens * params.width + size_t(at) * E, values);
}

#define instantiate_type(T, name)                                                 \
  instantiate_kernel("attention_unpack_4bit_" name, attention_unpack, T, 4)       \
  instantiate_kernel("attention_unpack_8bit_" name, attention_unpack, T, 8)

instantiate_type(half, "float16")
instantiate_type(bfloat, "bfloat16")
