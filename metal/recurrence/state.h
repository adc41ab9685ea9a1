// The state of a linear recurrence in registers: a row [columns] in neighbouring lanes of a simdgroup, 16 numbers a
// lane, in two groups of 8 that lie `lanes` groups apart, so that lanes read memory side by side.
#pragma once

#include <metal_stdlib>

#include "mittens/pack.h"
#include "params/recurrence.h"

using namespace metal;

namespace mittens {

// Which row of which head this lane works on. Lanes beyond the last row read its inputs, and neither read nor write a
// state.
struct StatePlace {
  uint sequence;
  uint head;
  uint key_head;
  uint row;
  uint lane;    // among the lanes that share the row
  bool writes;  // whether there is such a row
};

inline StatePlace state_place(uint3 group, uint simdgroup, uint lane, constant StateParams& params) {
  const uint rows_per_simdgroup = 32 / params.lanes;
  const uint row = (group.y * kStateSimdgroups + simdgroup) * rows_per_simdgroup + lane / params.lanes;
  StatePlace place;
  place.sequence = group.x / params.heads;
  place.head = group.x % params.heads;
  place.key_head = place.head / (params.heads / params.key_heads);
  place.row = min(row, params.rows - 1);
  place.lane = lane % params.lanes;
  place.writes = row < params.rows;
  return place;
}

// This lane's numbers of a row; zeros beyond its end.
template <typename T>
inline void load_values(const device T* p, uint lane, constant StateParams& params, thread float (&v)[kStateValues]) {
#pragma unroll
  for (uint j = 0; j < kStateValues / 8; ++j) {
    const uint at = 8 * (params.lanes * j + lane);
    if (params.packs) {
      constexpr int n = pack_size<T>();
#pragma unroll
      for (int part = 0; part < 8 / n; ++part) {
        float w[n];
        unpack<T>(at < params.columns ? load_pack(p + at + part * n, true) : uint4(0), w);
#pragma unroll
        for (int i = 0; i < n; ++i) {
          v[8 * j + part * n + i] = w[i];
        }
      }
    } else {
#pragma unroll
      for (uint i = 0; i < 8; ++i) {
        v[8 * j + i] = at + i < params.columns ? float(p[at + i]) : 0.0f;
      }
    }
  }
}

// This lane's numbers of a row in threadgroup memory, as load_values has them.
inline void shared_values(threadgroup const float* p, uint lane, uint lanes, thread float (&v)[kStateValues]) {
#pragma unroll
  for (uint j = 0; j < kStateValues / 8; ++j) {
#pragma unroll
    for (uint i = 0; i < 8; ++i) {
      v[8 * j + i] = p[8 * (lanes * j + lane) + i];
    }
  }
}

inline void store_values(
    device float* p, uint lane, constant StateParams& params, thread const float (&v)[kStateValues]) {
#pragma unroll
  for (uint j = 0; j < kStateValues / 8; ++j) {
    const uint at = 8 * (params.lanes * j + lane);
    if (params.packs) {
      if (at < params.columns) {
#pragma unroll
        for (uint i = 0; i < 8; i += 4) {
          *(device float4*)(p + at + i) = float4(v[8 * j + i], v[8 * j + i + 1], v[8 * j + i + 2], v[8 * j + i + 3]);
        }
      }
    } else {
#pragma unroll
      for (uint i = 0; i < 8; ++i) {
        if (at + i < params.columns) {
          p[at + i] = v[8 * j + i];
        }
      }
    }
  }
}

// The sum over the lanes that share a row.
inline float row_sum(float v, uint lanes) {
  for (ushort mask = lanes / 2; mask > 0; mask /= 2) {
    v += simd_shuffle_xor(v, mask);
  }
  return v;
}

// A number of an array of one of the types.
inline float number(const device ushort* p, uint type, size_t i) {
  return type == kFloat32   ? ((const device float*)p)[i]
         : type == kFloat16 ? float(((const device half*)p)[i])
                            : float(((const device bfloat*)p)[i]);
}

}  // namespace mittens
