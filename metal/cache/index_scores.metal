// How well keys fit each query of an indexer, whose heads share the keys:
//
//   y[l, t] = scale * sum_h weights[l, h] * max(q[h, l] . k[t], 0)
//
// Scores and sums are float32. A simdgroup keeps 8 keys in registers as left operands, K Q^T, and goes through the heads
// by 8, which the simdgroups of a threadgroup stage together. A lane adds up two heads of one key.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/operand.h"
#include "mittens/source/dense.h"
#include "params/chosen_keys.h"

using namespace metal;
using namespace mittens;

namespace mittens {

// NaN stays NaN, as in mx.maximum.
inline float positive_part(float v) {
  return v < 0.0f ? 0.0f : v;
}

}  // namespace mittens

template <typename T, int D>
[[kernel, max_total_threads_per_threadgroup(32 * kChosenKeysSimdgroups)]] void index_scores(
    const device T* q [[buffer(0)]],        // [batch, heads, queries, D]
    const device T* k [[buffer(1)]],        // [batch, keys, D]
    const device T* weights [[buffer(2)]],  // [batch, queries, heads]
    device T* y [[buffer(3)]],              // [batch, queries, keys]
    constant IndexScoresParams& params [[buffer(4)]], lane_of_simdgroup) {
  using Keys = Dense<T, 16 / sizeof(T)>;
  using U = typename Keys::Operand;
  constexpr int E = Keys::Values::size;
  constexpr int parts = D / (4 * E);
  threadgroup vec<U, 2> staged[D / 8 * 32];
  const uint key = (group.x * kChosenKeysSimdgroups + simdgroup) * 8 + tile_row(lane);
  const size_t row = min(key, params.keys - 1);
  const Keys keys = Keys::of(k + group.z * params.key_strides[0] + row * params.key_strides[1], 0);
  typename Keys::Run runs[parts];
#pragma unroll
  for (int part = 0; part < parts; ++part) {
    runs[part] = keys.load(0, part * 4 + tile_column(lane) / 2);
  }
  const device T* query = q + group.z * params.query_strides[0] + group.y * params.query_strides[2];
  const device T* weight = weights + group.z * params.weight_strides[0] + group.y * params.weight_strides[1];
  float total = 0;
  for (uint first = 0; first < params.heads; first += 8) {
    const uint head = first + tile_column(lane);
    const bool has_first = head < params.heads;
    const bool has_second = head + 1 < params.heads;
    const device T* own = query + head * params.query_strides[1];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint n = simdgroup; n < D / 8; n += kChosenKeysSimdgroups) {
      const uint column = column_of_right<E>(n, tile_row(lane));
      vec<U, 2> pair = vec<U, 2>(U(0), U(0));
      pair.x = has_first ? U(own[column]) : pair.x;
      pair.y = has_second ? U(own[params.query_strides[1] + column]) : pair.y;
      staged[n * 32 + lane] = pair;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float2 scores = float2(0);
#pragma unroll
    for (int part = 0; part < parts; ++part) {
#pragma unroll
      for (int t = 0; t < E / 2; ++t) {
        const vec<U, 2> pair = vec<U, 2>(Keys::element(runs[part], 2 * t), Keys::element(runs[part], 2 * t + 1));
        scores = multiply_tiles<U>(pair, staged[(part * E / 2 + t) * 32 + lane], scores);
      }
    }
    total += has_first ? positive_part(scores.x) * float(weight[head]) : 0.0f;
    total += has_second ? positive_part(scores.y) * float(weight[head + 1]) : 0.0f;
  }
  total = lanes_of_row_sum(total);
  if (tile_column(lane) == 0 && key < params.keys) {
    y[(size_t(group.z) * params.queries + group.y) * params.keys + key] = T(params.scale * total);
  }
}

instantiate_types("index_scores_64", index_scores, 64)
instantiate_types("index_scores_128", index_scores, 128)
