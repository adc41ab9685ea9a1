// Sums of many values over the lanes of a simdgroup at once. Halves of the lanes exchange halves of the values, so
// that C sums take about C + 5 shuffles rather than 5 * C, and each lane ends with the sums of its own.
#pragma once

#include <metal_stdlib>

using namespace metal;

namespace mittens {

// One exchange: N values a lane are left as half of them, or the one value as its sum with the other lane's.
template <int N, int mask, int C>
inline void exchange(thread float (&v)[C], uint lane) {
  if constexpr (N > 1) {
    const bool upper = lane & mask;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float kept = upper ? v[i + N / 2] : v[i];
      const float sent = upper ? v[i] : v[i + N / 2];
      v[i] = kept + simd_shuffle_xor(sent, ushort(mask));
    }
  } else {
    v[0] += simd_shuffle_xor(v[0], ushort(mask));
  }
  if constexpr (mask > 1) {
    exchange<(N > 1 ? N / 2 : 1), mask / 2>(v, lane);
  }
}

// C is a power of two. Up to 32: v[0] becomes the sum of value lane / (32 / C). Beyond: v[i] the sum of value lane * (C
// / 32) + i.
template <int C>
inline void simd_reduce_scatter(thread float (&v)[C], uint lane) {
  exchange<C, 16>(v, lane);
}

}  // namespace mittens
