// Attention of many tokens where attention/attention_mma.metal does not take it: of heads other than 64 and 128 wide, and
// on Apple GPUs in float32:
//
//   y = softmax(scale * q k^T + mask) v
//
// A simdgroup takes 8 * R rows of queries on its own and walks along the keys, 8 * C at a time: scores, their softmax
// so far, their product with the values. Queries, scores and sums are tiles in registers; fragments of keys and values
// come straight from device memory, by 16 bytes where the width allows (mittens/fragment_layout.h). Nothing is staged and nobody
// waits: the simdgroups of a threadgroup only share what they read, as they take neighbouring rows. Keys that no row of
// a simdgroup sees, by causality, window or a bool mask, are not read.
//
// The tile is as large as leaves the machine occupied. Of 32-bit registers a lane holds 2 R D / 8 of sums, R D / 8 (half
// types; twice that in float32) of queries and 2 R C of scores: at D = 64 and R = 2 that is 80, at D = 128 and R = 1 it
// is 72, which leaves registers for what is on its way, and for many simdgroups. R = 2 at D = 128 would halve the
// fragments to load, and the simdgroups too. C is 4 where scores leave registers for it, else 2.
//
// In float32 at D = 192 and 256 the queries would take as many registers as the sums: there they are loaded again for
// each tile of keys. So they are at D = 72, where a register would spill otherwise.
//
// On NVIDIA GPUs sums are added to where that is written. LLVM would move that past the branches of the next loads, and
// the operands of all products would wait in registers:
// nvptx: -instcombine-code-sinking=0
//
// A row that sees no key at all has the mean of all values, as in mx: it then goes through what was left out. (MLX's
// Metal kernels differ there: 0 in decoding, the mean of the keys that its tile read in prefill.)
#include <metal_stdlib>

#include "attention/seen_values.h"
#include "mittens/fragment_layout.h"
#include "mittens/instantiate.h"

using namespace metal;
using namespace mittens;

constant constexpr int prefill_simdgroups = kPrefillSimdgroups;

// The matrices of a simdgroup.
template <typename T, int D, int R>
struct Prefill {
  static constant constexpr int C = D == 64 || (D == 128 && sizeof(T) == 2) ? 4 : 2;
  static constant constexpr int W = dealt_width(D, 16 / sizeof(T));  // of queries and keys
  static constant constexpr int V = dealt_width(D, 4);               // of values and sums
  // Matrices of queries at hand: all, or those of one block, which are then loaded for each tile of keys.
  static constant constexpr int Q = sizeof(T) == 2 || (D <= 128 && D != 72) ? D / 8 : W;

  Fragments<T, Q> queries[R];
  Fragments<float, D / 8> sums[R];
  SoftmaxState<RowValues<R>> state;  // l: of the lane's columns
};

// Where a simdgroup's rows and head are.
template <typename T>
struct PrefillPlace {
  const device T* queries;  // of the head
  const device T* keys;
  const device T* values;
  const device T* mask;
  uint first;  // row
  uint lane;
};

// The last key that the first row sees, if causal.
template <typename T>
inline int position_of(PrefillPlace<T> place, constant AttentionParams& params) {
  return int(place.first + params.keys) - int(params.queries);
}

inline uint clamped_row(uint first, int r, uint lane, uint queries) {
  return min(first + r * 8 + tile_row(lane), queries - 1);
}

// Which of the lane's scores a bool mask lets be seen, a bit each.
template <int R, int C, typename T>
inline uint seen_bits(PrefillPlace<T> place, uint key, constant AttentionParams& params) {
  uint bits = 0;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const device uchar* row = (const device uchar*)place.mask +
        clamped_row(place.first, r, place.lane, params.queries) * params.mask_strides[2];
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (uint i = 0; i < 2; ++i) {
        const uint column = key + c * 8 + tile_column(place.lane) + i;
        if (column < params.keys && row[column * params.mask_strides[3]] != 0) {
          bits |= 1u << ((r * C + c) * 2 + i);
        }
      }
    }
  }
  return bits;
}

template <int R, int C>
inline void hide_unseen(thread Tile<float, R, C>& scores, uint bits, float value) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        scores.at[r][c][i] = bits & (1u << ((r * C + c) * 2 + i)) ? scores.at[r][c][i] : value;
      }
    }
  }
}

template <int R, int C, typename T>
inline void add_mask(
    thread Tile<float, R, C>& scores, PrefillPlace<T> place, uint key, constant AttentionParams& params) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const device T* row =
        place.mask + clamped_row(place.first, r, place.lane, params.queries) * params.mask_strides[2];
#pragma unroll
    for (int c = 0; c < C; ++c) {
#pragma unroll
      for (uint i = 0; i < 2; ++i) {
        const uint column = key + c * 8 + tile_column(place.lane) + i;
        if (column < params.keys) {
          scores.at[r][c][i] = added_score<T>(scores.at[r][c][i], float(row[column * params.mask_strides[3]]));
        }
      }
    }
  }
}

template <int R, int C>
inline void softmax_weights(thread Tile<float, R, C>& scores) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      scores.at[r][c] = float2(softmax_weight<float>(scores.at[r][c].x), softmax_weight<float>(scores.at[r][c].y));
    }
  }
}

// The queries from matrix `first` on.
template <typename T, int D, int R>
inline void load_queries(
    thread Prefill<T, D, R>& own, PrefillPlace<T> place, int first, constant AttentionParams& params) {
  constexpr int W = Prefill<T, D, R>::W;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const device T* row =
        place.queries + clamped_row(place.first, r, place.lane, params.queries) * params.query_strides[2];
    load_dealt_left<T, W, Prefill<T, D, R>::Q / W>(
        own.queries[r], row + first * 8, params.queries_aligned, place.lane);
  }
}

// scores = queries keys^T, from key `key` on.
template <typename T, int D, int R, int C>
inline void multiply_keys(
    thread Tile<float, R, C>& scores, thread Prefill<T, D, R>& own, PrefillPlace<T> place, uint key,
    constant AttentionParams& params) {
  constexpr int W = Prefill<T, D, R>::W;
  constexpr int Q = Prefill<T, D, R>::Q;
  fill(scores, 0.0f);
#pragma unroll
  for (int q = 0; q < D / 8; q += Q) {
    if (Q < D / 8) {
      load_queries(own, place, q, params);
    }
#pragma unroll
    for (int c = 0; c < C; ++c) {
      const uint column = key + c * 8 + tile_column(place.lane);
      const device T* row = place.keys + int64_t(min(column, params.keys - 1)) * params.key_stride;
      const device T* next = place.keys + int64_t(min(column + 1, params.keys - 1)) * params.key_stride;
#pragma unroll
      for (int b = 0; b < Q; b += W) {
        Fragments<T, W> k;
        load_dealt_right<T, W>(k, row + (q + b) * 8, next + (q + b) * 8, params.aligned, place.lane);
#pragma unroll
        for (int t = 0; t < W; ++t) {
#pragma unroll
          for (int r = 0; r < R; ++r) {
            scores.at[r][c] = multiply_tiles<T>(own.queries[r].at[b + t], k.at[t], scores.at[r][c]);
          }
        }
      }
    }
  }
}

// sums += weights values, from key `key` on.
template <typename T, int D, int R, int C>
inline void multiply_values(
    thread const Tile<T, R, C>& weights, thread Prefill<T, D, R>& own, PrefillPlace<T> place, uint key,
    constant AttentionParams& params) {
  constexpr int V = Prefill<T, D, R>::V;
#pragma unroll
  for (int c = 0; c < C; ++c) {
    const uint row_key = key + c * 8 + tile_row(place.lane);
    const device T* row = place.values + int64_t(min(row_key, params.keys - 1)) * params.value_stride;
#pragma unroll
    for (int b = 0; b < D / 8; b += V) {
      Fragments<T, V> v;
      load_dealt_pairs<T, V>(v, row + b * 8, row_key < params.keys, params.aligned, place.lane);
#pragma unroll
      for (int t = 0; t < V; ++t) {
#pragma unroll
        for (int r = 0; r < R; ++r) {
          own.sums[r].at[b + t] = multiply_tiles<T>(weights.at[r][c], v.at[t], own.sums[r].at[b + t]);
        }
      }
    }
  }
}

// Brings keys `key` .. key + 8 C in. visible: some row may see some of them; else all are hidden.
template <typename T, int D, int R>
inline void attend(
    thread Prefill<T, D, R>& own, PrefillPlace<T> place, uint key, bool visible, uint seen,
    constant AttentionParams& params) {
  constexpr int C = Prefill<T, D, R>::C;
  const float hidden = hidden_score(params);
  Tile<float, R, C> scores;
  if (visible) {
    multiply_keys<T, D, R, C>(scores, own, place, key, params);
    multiply(scores, params.scale);
    const int first = position_of(place, params) - int(key) + 1;  // column of row 0 that it does not see
    if (params.mask == bool_mask) {
      hide_unseen(scores, seen, hidden);
    } else if (params.mask == additive_mask) {
      add_mask(scores, place, key, params);
    }
    if (params.causal && first < 8 * C) {
      fill_from(scores, first, hidden, place.lane);
    }
    if (params.window && first + 8 * R - int(params.window) > 0) {
      fill_before(scores, first - int(params.window), hidden, place.lane);
    }
  } else {
    fill(scores, hidden);
  }
  if (key + 8 * C > params.keys) {
    fill_columns_from(scores, params.keys - key, -INFINITY, place.lane);
  }

  RowValues<R> base = own.state.m;
  row_max(scores, base);
  RowValues<R> factor;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float raised = base.at[r];
    base.at[r] = finite_maximum(raised);
    factor.at[r] = softmax_weight<T>(own.state.m.at[r] - base.at[r]);
    own.state.m.at[r] = raised;
    own.state.l.at[r] *= factor.at[r];
#pragma unroll
    for (int d = 0; d < D / 8; ++d) {
      own.sums[r].at[d] *= factor.at[r];
    }
  }
  subtract_rows(scores, base);
  if constexpr (is_same_v<T, float>) {
    softmax_weights(scores);
  } else {
    exp2_of(scores);
  }
  row_sum_of_lane(scores, own.state.l);
  const Tile<T, R, C> weights = converted<T>(scores);
  multiply_values<T, D, R, C>(weights, own, place, key, params);
}

template <typename T>
inline PrefillPlace<T> place_of(
    const device T* queries, const device T* keys, const device T* values, const device T* mask, uint3 group,
    uint groups, uint rows, uint lane, uint simdgroup, constant AttentionParams& params) {
  const uint head = group.y;
  const uint key_head = head / params.ratio;
  PrefillPlace<T> place;
  // The last rows, which see the most if causal, start first.
  place.first = ((groups - 1 - group.x) * prefill_simdgroups + simdgroup) * rows;
  place.lane = lane;
  place.queries = queries + head_offset(params.query_start, params.query_strides, group.z, head);
  place.keys = keys + head_offset(params.key_start, params.key_strides, group.z, key_head);
  place.values = values + head_offset(params.value_start, params.value_strides, group.z, key_head);
  const int64_t mask_offset = head_offset(params.mask_start, params.mask_strides, group.z, head);
  place.mask =
      params.mask == bool_mask ? (const device T*)((const device uchar*)mask + mask_offset) : mask + mask_offset;
  return place;
}

// Row `own` of the simdgroup's results from column `column` on, of the keys that it sees. `maximum`: the row's; share:
// by what its sum becomes the result.
template <typename T, int D>
inline void write_seen(
    device T* y, PrefillPlace<T> place, uint3 group, uint own, uint column, float maximum, float share,
    constant AttentionParams& params) {
  const uint row = place.first + own;
  ScoredRow scored;
  scored.mask = (const device uchar*)place.mask + row * params.mask_strides[2] * mask_item<T>(params);
  scored.position = int(row + params.keys) - int(params.queries);
  const uint d = column + place.lane;
  const float sum = seen_sum(
      plain_rows(place.keys, 0, params.key_stride, params), plain_rows(place.values, 0, params.value_stride, params),
      place.queries + row * params.query_strides[2], scored, uint2(0, params.keys), finite_maximum(maximum),
      min(d, uint(D - 1)), d < D, place.lane, params);
  if (d < D) {
    y[((size_t(group.z) * params.heads + group.y) * params.queries + row) * D + d] = T(sum * share);
  }
}

template <typename T, int D, int R>
[[kernel, max_total_threads_per_threadgroup(128)]] void attention_prefill(
    const device T* queries [[buffer(0)]],  // [batch, heads, queries, D]
    const device T* keys [[buffer(1)]],     // [batch, key_heads, keys, D]
    const device T* values [[buffer(2)]],   // [batch, key_heads, keys, D]
    const device T* mask [[buffer(3)]],     // [batch, heads, queries, keys], or of bools
    const device T* sinks [[buffer(4)]],    // [heads]
    device T* y [[buffer(5)]],              // [batch, heads, queries, D]
    constant AttentionParams& params [[buffer(6)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint3 groups [[threadgroups_per_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  constexpr int C = Prefill<T, D, R>::C;
  const uint head = group.y;
  const PrefillPlace<T> place =
      place_of(queries, keys, values, mask, group, groups.x, 8 * R, lane, simdgroup, params);
  if (place.first >= params.queries) {
    return;
  }

  Prefill<T, D, R> own;
  fill(own.state.m, -INFINITY);
  fill(own.state.l, 0.0f);
  if (Prefill<T, D, R>::Q == D / 8) {
    load_queries(own, place, 0, params);
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int d = 0; d < D / 8; ++d) {
      own.sums[r].at[d] = float2(0);
    }
  }

  uint begin = 0;
  uint end = params.keys;
  if (params.causal) {
    const int position = position_of(place, params);
    end = uint(clamp(position + 8 * R, 0, int(params.keys)));
    if (params.window) {
      begin = uint(max(position + 1 - int(params.window), 0)) / (8 * C) * (8 * C);
    }
  }
  bool left_out = false;  // whether it is the turn of what was left out
  uint key = begin;
  while (true) {
    if (key >= (left_out ? params.keys : end)) {
      bool unseeing = false;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        unseeing = unseeing || own.state.m.at[r] <= hidden_score(params);
      }
      if (left_out || params.mask == additive_mask || !simd_any(unseeing)) {
        break;
      }
      left_out = true;
      key = 0;
    }
    bool visible = key >= begin && key < end;
    uint seen = 0;
    if (visible && params.mask == bool_mask) {
      seen = seen_bits<R, C>(place, key, params);
      visible = simd_any(seen != 0);
    }
    if (visible != left_out) {
      attend<T, D, R>(own, place, key, visible, seen, params);
    }
    key += 8 * C;
  }

  RowValues<R> shares;
  uint left = 0;  // blocks of rows
#pragma unroll
  for (int r = 0; r < R; ++r) {
    float total = lanes_of_row_sum(own.state.l.at[r]);
    float factor = 1;
    if (params.has_sinks) {
      const float sink = float(sinks[head]) * score_unit<T>();
      const float base = finite_maximum(max(own.state.m.at[r], sink));
      factor = softmax_weight<T>(own.state.m.at[r] - base);
      total = fma(total, factor, softmax_weight<T>(sink - base));
    }
    const float share = factor / total;
    shares.at[r] = share;
    const uint row = place.first + r * 8 + tile_row(lane);
    bool whole = true;
#pragma unroll
    for (int d = 0; d < D / 8; ++d) {
      whole = whole && is_finite(own.sums[r].at[d].x) && is_finite(own.sums[r].at[d].y);
    }
    // Where its share is NaN, a row is, whatever its sums.
    if (may_hide(params) && simd_any(!whole && !is_nan(share))) {
      left |= 1u << r;
    } else if (row < params.queries) {
      constexpr int V = Prefill<T, D, R>::V;
      device T* to = y + ((size_t(group.z) * params.heads + head) * params.queries + row) * D;
#pragma unroll
      for (int b = 0; b < D / 8; b += V) {
        Fragments<float, V> results;
#pragma unroll
        for (int t = 0; t < V; ++t) {
          results.at[t] = own.sums[r].at[b + t] * share;
        }
        store_dealt_pairs<T, V>(results, to + b * 8, lane);
      }
    }
  }
  constexpr uint parts = (D + 31) / 32;  // of a row
#pragma unroll 1
  for (uint i = 0; left != 0 && i < 8 * R * parts; ++i) {
    const uint own_row = i / parts;
    const float maximum = own_row < 8 ? own.state.m.at[0] : own.state.m.at[R - 1];  // R is 1 or 2
    const float share = own_row < 8 ? shares.at[0] : shares.at[R - 1];
    const ushort from = tile_lane(own_row % 8, 0);
    const float row_maximum = simd_shuffle(maximum, from);
    const float row_share = simd_shuffle(share, from);
    if ((left >> own_row / 8) % 2 != 0 && place.first + own_row < params.queries) {
      const uint3 anew = found_anew(group, params);
      const PrefillPlace<T> again =
          place_of(queries, keys, values, mask, anew, groups.x, 8 * R, lane, simdgroup, params);
      write_seen<T, D>(y, again, anew, own_row, i % parts * 32, row_maximum, row_share, params);
    }
  }
}

instantiate_kernel("attention_prefill_64_float32", attention_prefill, float, 64, 2)
instantiate_types("attention_prefill_72", attention_prefill, 72, 1)
instantiate_types("attention_prefill_80", attention_prefill, 80, 1)
instantiate_types("attention_prefill_96", attention_prefill, 96, 1)
instantiate_kernel("attention_prefill_128_float32", attention_prefill, float, 128, 1)
instantiate_types("attention_prefill_192", attention_prefill, 192, 1)
instantiate_types("attention_prefill_256", attention_prefill, 256, 1)
