// A smooth bound of logits, elementwise: y = T(cap * tanh(x / cap)), in float32, and its derivative times dy: dx = T(dy
// * (1 - tanh(x / cap)^2)), where 1 - tanh(u)^2 = 4 e / (1 + e)^2 with e = exp(-2 |u|).
//
// x, y, dy, dx [size]; y may be x, and dx may be x or dy. A threadgroup takes as many packs as it has threads; each of
// its parts of x starts as far off a 16-byte boundary as x does, so that it is loaded like a row.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/row_io.h"
#include "params/norm.h"

using namespace metal;
using namespace mittens;

inline float bounded(float x, float cap) {
  return cap * precise::tanh(x / cap);
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void softcap(
    const device T* x [[buffer(0)]], device T* y [[buffer(1)]], constant SoftcapParams& params [[buffer(2)]],
    uint group [[threadgroup_position_in_grid]], uint t [[thread_position_in_threadgroup]],
    uint threads [[threads_per_threadgroup]]) {
  constexpr uint W = pack_size<T>();
  const size_t start = size_t(group) * threads * W;
  const uint count = uint(min(size_t(threads * W), size_t(params.size) - start));
  const RowSpan span = row_span<T>(params.x_phase, count);
  x += start;
  y += start;
  if (t < span.packs) {
    const uint at = span.head + t * W;
    float v[16 / sizeof(T)];
    unpack<T>(load_pack(x + at, true), v);
#pragma unroll
    for (uint i = 0; i < W; ++i) {
      v[i] = bounded(v[i], params.cap);
    }
    store_pack(y + at, packs_aligned<T>(params.y_phase, span), pack<T>(v));
  }
  store_edge(y, span, t, bounded(float(load_edge(x, span, t, 0)), params.cap));
}

// 1 - tanh^2 cancels where tanh is near 1.
inline float derived(float x, float dy, float cap) {
  const float e = precise::exp(-2.0f * abs(x / cap));
  return dy * (4.0f * e / ((1.0f + e) * (1.0f + e)));
}

template <typename T>
[[kernel, max_total_threads_per_threadgroup(256)]] void softcap_vjp(
    const device T* x [[buffer(0)]], const device T* dy [[buffer(1)]], device T* dx [[buffer(2)]],
    constant SoftcapVjpParams& params [[buffer(3)]], uint group [[threadgroup_position_in_grid]],
    uint t [[thread_position_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  constexpr uint W = pack_size<T>();
  const size_t start = size_t(group) * threads * W;
  const uint count = uint(min(size_t(threads * W), size_t(params.size) - start));
  const RowSpan span = row_span<T>(params.x_phase, count);
  x += start;
  dy += start;
  dx += start;
  if (t < span.packs) {
    const uint at = span.head + t * W;
    float v[16 / sizeof(T)];
    float dv[16 / sizeof(T)];
    unpack<T>(load_pack(x + at, true), v);
    unpack<T>(load_pack(dy + at, packs_aligned<T>(params.dy_phase, span)), dv);
#pragma unroll
    for (uint i = 0; i < W; ++i) {
      v[i] = derived(v[i], dv[i], params.cap);
    }
    store_pack(dx + at, packs_aligned<T>(params.dx_phase, span), pack<T>(v));
  }
  store_edge(dx, span, t, derived(float(load_edge(x, span, t, 0)), float(load_edge(dy, span, t, 0)), params.cap));
}

instantiate_types("softcap", softcap)
instantiate_types("softcap_vjp", softcap_vjp)
