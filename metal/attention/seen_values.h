// Which keys a row sees, and what that makes of their scores. The values of hidden keys must not matter, whatever they
// are; but the kernels multiply all values of a tile with the weights of all rows, where 0 times NaN or infinity is
// NaN. They look at the sums in the end: what is not finite is summed up again by seen_sum, key by key.
#pragma once

#include "attention/attention.h"
#include "attention/kv_source.h"

namespace mittens {

// The row of queries whose scores a lane has.
struct ScoredRow {
  const device uchar* mask;  // where its mask starts
  int position;              // the last key that it sees, if causal
};

template <typename T>
inline uint mask_item(constant AttentionParams& params) {
  return params.mask == additive_mask ? sizeof(T) : 1;
}

// Whether a row sees a key, by causality, window and a bool mask.
inline bool sees(ScoredRow row, uint key, constant AttentionParams& params) {
  bool seen = true;
  if (params.causal) {
    seen = int(key) <= row.position && (params.window == 0 || int(key) > row.position - int(params.window));
  }
  if (params.mask == bool_mask) {
    seen = seen && row.mask[key * params.mask_strides[3]] != 0;
  }
  return seen;
}

// A score with what a mask adds to it. -inf hides a key, whose score may be NaN.
template <typename T>
inline float added_score(float score, float added) {
  return added == -INFINITY ? -INFINITY : fma(added, score_unit<T>(), score);
}

template <typename T>
inline float masked_score(float score, uint key, ScoredRow row, constant AttentionParams& params) {
  if (params.mask == additive_mask) {
    score = added_score<T>(score, float(((const device T*)row.mask)[key * params.mask_strides[3]]));
  }
  return sees(row, key, params) ? score : hidden_score(params);
}

// Adds a zero that the compiler cannot know, so that it recomputes what depends on the value instead of keeping it in
// registers.
template <typename V>
inline V found_anew(V value, constant AttentionParams& params) {
  return value + V(params.key_heads == 0 ? 1 : 0);
}

inline int64_t head_offset(int64_t start, constant int64_t* strides, uint batch, uint head) {
  return start + batch * strides[0] + head * strides[1];
}

// One head's keys or values.
template <typename T>
inline PlainRows<T> plain_rows(const device T* elements, int64_t offset, int stride, constant AttentionParams& params) {
  PlainRows<T> rows;
  rows.elements = elements + offset;
  rows.stride = stride;
  rows.aligned = params.aligned;
  return rows;
}

template <typename T>
inline float element_at(PlainRows<T> rows, uint row, uint column) {
  return float(at_row(rows, int(row)).elements[column]);
}

template <typename T, int bits>
inline float element_at(PackedRows<T, bits> rows, uint row, uint column) {
  const PackedRows<T, bits> from = at_row(rows, int(row));
  const uint byte = from.bytes[column * bits / 8];
  const uint group = column >> rows.group_shift;
  const uint integer = bits == 8 ? byte : byte >> (column % 2 * 4) & 15u;
  return fma(float(integer), float(from.scales[group]), float(from.biases[group]));
}

// Of the keys of a range, the sum of a row's weights times one column of the values, each lane its own; the row's
// scores less `base` are what its weights come from. A key that the row does not see has the weight of a hidden key.
// That is 0 unless the row sees no key. A hidden value that is not finite counts as 0. The lanes of a simdgroup share
// the elements of a head; they stop when all sums that are wanted are NaN.
template <typename T, typename Rows>
inline float seen_sum(
    Rows keys, Rows values, const device T* query, ScoredRow row, uint2 range, float base, uint column, bool wanted,
    uint lane, constant AttentionParams& params) {
  float sum = 0;
#pragma unroll 1
  for (uint key = range.x; key < range.y; ++key) {
    float score = masked_score<T>(0.0f, key, row, params);
    const bool seen = sees(row, key, params) && score != -INFINITY;
    if (seen) {
      float product = 0;
#pragma unroll 1
      for (uint d = 0; d < params.width; d += 32) {
        if (d + lane < params.width) {
          product = fma(float(query[d + lane]), element_at(keys, key, d + lane), product);
        }
      }
      score = fma(simd_sum(product), params.scale, score);
    }
    const float weight = softmax_weight<T>(score - base);
    if (seen || weight != 0.0f) {
      const float value = element_at(values, key, column);
      sum = seen || is_finite(value) ? fma(weight, value, sum) : sum;
      if (simd_all(is_nan(sum) || !wanted)) {
        break;
      }
    }
  }
  return sum;
}

}  // namespace mittens
