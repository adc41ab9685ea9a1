// The mathematics that rms_norm and add_rms_norm share, on what one thread holds of a row.
#pragma once

#include "mittens/row.h"

namespace mittens {

// Sum of squares; packs and edges outside the row hold zeros.
template <typename T, int N>
inline float square_sum(thread const RowPart<T, N>& part) {
  float sum = float(part.edge) * float(part.edge);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float v[16 / sizeof(T)];
    unpack<T>(part.packs[i], v);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      sum += v[j] * v[j];
    }
  }
  return sum;
}

inline float inverse_rms(float square_sum, uint columns, float eps) {
  return precise::rsqrt(square_sum / float(columns) + eps);
}

// x * inverse_rms is rounded to T before the weight is applied, as mx does.
template <typename T>
inline uint4 normalize_pack(uint4 x, float inverse_rms, bool has_weight, uint4 weight) {
  float v[16 / sizeof(T)];
  unpack<T>(x, v);
#pragma unroll
  for (int j = 0; j < pack_size<T>(); ++j) {
    v[j] *= inverse_rms;
  }
  if (has_weight) {
    float w[16 / sizeof(T)];
    unpack<T>(weight, w);
#pragma unroll
    for (int j = 0; j < pack_size<T>(); ++j) {
      v[j] = round_to<T>(v[j]) * w[j];
    }
  }
  return pack<T>(v);
}

template <typename T>
inline float normalize_edge(T x, float inverse_rms, bool has_weight, T weight) {
  const float v = float(x) * inverse_rms;
  return has_weight ? round_to<T>(v) * float(weight) : v;
}

// The weight, [columns], of what a thread holds of a row; zeros where there is none.
template <typename T, int N>
inline void load_weight(
    const device T* weight, bool has_weight, uint weight_phase, RowSpan span, uint t, uint threads,
    thread RowPart<T, N>& w) {
  const bool aligned = packs_aligned<T>(weight_phase, span);
  load_packs(weight, span, aligned, t, threads, has_weight ? span.packs : 0, uint4(0), w);
  w.edge = has_weight ? load_edge(weight, span, t, 0) : T(0);
}

// part, which holds x, becomes y.
template <typename T, int N>
inline void normalize_part(
    thread RowPart<T, N>& part, float inverse_rms, bool has_weight, thread const RowPart<T, N>& weight) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    part.packs[i] = normalize_pack<T>(part.packs[i], inverse_rms, has_weight, weight.packs[i]);
  }
  part.edge = T(normalize_edge<T>(part.edge, inverse_rms, has_weight, weight.edge));
}

// The same with the weight, [columns], loaded pack by pack.
template <typename T, int N>
inline void normalize_part(
    thread RowPart<T, N>& part, float inverse_rms, const device T* weight, bool has_weight, uint weight_phase,
    RowSpan span, uint thread_index, uint first, uint stride, uint end) {
  const bool aligned = packs_aligned<T>(weight_phase, span);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint p = first + i * stride;
    const uint4 w =
        has_weight && p < end ? load_pack(weight + span.head + p * pack_size<T>(), aligned) : uint4(0);
    part.packs[i] = normalize_pack<T>(part.packs[i], inverse_rms, has_weight, w);
  }
  const T w = has_weight ? load_edge(weight, span, thread_index, 0) : T(0);
  part.edge = T(normalize_edge<T>(part.edge, inverse_rms, has_weight, w));
}

}  // namespace mittens
