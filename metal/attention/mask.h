// Which keys the rows of queries see, and the mask added to their scores. A hidden key has a score of -inf, even if it
// is NaN.
#pragma once

#include "mittens/online_softmax.h"
#include "params/attention.h"

namespace mittens {

// A simdgroup's part of the work.
struct AttentionPlace {
  uint batch;
  uint key_head;
  uint split;  // of the keys
  uint slice;  // of the columns of the values
  uint first;  // row
  uint rows;   // that share these keys
  uint lane;
  uint simdgroup;
  uint simdgroups;
};

// One row of queries: the keys that it may see by causality and a window, where its mask begins, and its row of y.
// They lie in threadgroup memory, as registers are needed for other things.
struct AttentionRow {
  uint begin;
  uint end;
  uint mask;
  uint result;
};

constant constexpr uint no_row = 0xffffffffu;

// The keys of a simdgroup: all that any of its rows may see, and within them the keys that every row sees.
struct KeyRange {
  uint begin;
  uint end;
  uint seen_by_all_begin;
  uint seen_by_all_end;
};

// The keys of a batch's row that a threadgroup takes, in steps from the first on.
struct KeyShare {
  uint first;
  uint last;
  uint end;  // of all keys of the row: causality counts from here
};

// Rows of a batch that all have every key.
struct EveryKey {
  KeyShare share(AttentionPlace place, constant AttentionParams& params, uint step) const {
    // The first key is a multiple of `step`. Without the division ptxas spills registers of one variant more.
    const uint first = params.first_key / step * step + place.split * params.keys_per_split;
    return KeyShare{first, min(first + params.keys_per_split, params.keys), params.keys};
  }

  uint first_of(uint query, KeyShare share) const {
    return share.first;
  }

  // Keys that may be read end here.
  uint end(constant AttentionParams& params) const {
    return params.keys;
  }

  uint aligned(uint key, KeyShare share, uint step) const {
    return max(key / step * step, share.first);
  }

  template <typename T>
  void refuse(
      thread OnlineSoftmax<T>& state, AttentionPlace place, constant AttentionParams& params, uint worker) const {}
};

// Keys and values that lie one after the other: a simdgroup's step is in no block.
struct WholeRow {};

struct WholeRows {
  static constant constexpr bool may_lack = false;  // keys

  void seek(uint key) {}

  WholeRow take(uint key, uint step) {
    return WholeRow{};
  }
};

template <typename Rows>
inline thread const Rows& rows_in(WholeRow block, thread const Rows& rows) {
  return rows;
}

// Fills `rows` for `count` rows, at most 32, and returns their range of keys. It begins on a multiple of `step`, so
// that the order of a sum does not depend on where it begins.
template <uint count, typename Limits>
inline KeyRange find_rows(
    threadgroup AttentionRow* rows, AttentionPlace place, Limits limits, constant AttentionParams& params, uint step) {
  const KeyShare share = limits.share(place, params, step);
  const uint row = min(place.first + place.lane % count, place.rows - 1);
  const uint query = row % params.queries;
  const uint head = place.key_head * params.ratio + row / params.queries;
  uint begin = limits.first_of(query, share);
  uint end = share.last;
  if (params.causal) {
    const int past = int(query + share.end) - int(params.queries) + 1;
    end = min(int(share.last), max(past, 0));
    begin = params.window != 0 && past > int(params.window) ? max(begin, uint(past) - params.window) : begin;
  }
  if (place.lane < count) {
    threadgroup AttentionRow& own = rows[place.lane];
    own.begin = begin;
    own.end = end;
    own.mask = uint(TokenRows::at(int64_t(0), params.mask, place.batch, head, query));
    own.result = place.first + place.lane < place.rows
                     ? (place.batch * params.key_heads + place.key_head) * place.rows + row
                     : no_row;
  }
  KeyRange range;
  range.begin = limits.aligned(simd_min(begin), share, step);
  range.end = simd_max(end);
  range.seen_by_all_begin = params.mask_kind == no_mask ? simd_max(begin) : share.last;
  range.seen_by_all_end = simd_min(end);
  return range;
}

// The maximum of a row. A row whose keys all score -inf has lowest_score, a row without keys -inf. A key that an
// array's mask hides by -inf does not count as seen.
inline float seen_maximum(float m, threadgroup const AttentionRow& row, constant AttentionParams& params) {
  return m == -INFINITY && params.mask_kind == no_mask && row.begin < row.end ? lowest_score : m;
}

// A lane's scores as bits: its two rows for each 8 keys.
template <int C>
constexpr uint all_hidden() {
  return (1u << 2 * C) - 1;
}

// Where the keys of a tile cannot be read, these are added to the sums of weights of a lane's two rows: NaN for a row
// that sees one of them.
template <int C>
inline float2 nan_where_seen(uint hidden) {
  constexpr uint of_first = all_hidden<C>() / 3;  // every second bit, from the first on
  const bool first = (hidden & of_first) != of_first;
  const bool second = (hidden >> 1 & of_first) != of_first;
  return float2(first ? NAN : 0.0f, second ? NAN : 0.0f);
}

// Which of a tile's scores are hidden, as bits. A mask is not read beyond the keys that a row sees otherwise.
template <int C, typename T>
inline uint hidden_keys(
    uint first, threadgroup const AttentionRow* rows, const device T* mask, constant AttentionParams& params,
    uint lane) {
  uint hidden = 0;
#pragma unroll
  for (uint i = 0; i < 2; ++i) {
    threadgroup const AttentionRow& own = rows[tile_column(lane) + i];
#pragma unroll
    for (uint c = 0; c < C; ++c) {
      const uint key = first + c * 8 + tile_row(lane);
      bool sees = key >= own.begin && key < own.end;
      const uint at = own.mask + (sees ? key : 0) * uint(params.mask_key);
      if (params.mask_kind == bool_mask) {
        sees = sees && ((const device uchar*)mask)[at] != 0;
      } else if (params.mask_kind == additive_mask) {
        sees = sees && float(mask[at]) != -INFINITY;
      }
      hidden |= (sees ? 0u : 1u) << (2 * c + i);
    }
  }
  return hidden;
}

template <typename T, int C>
inline void mask_scores(
    thread Tile<float, C, 1>& scores, uint hidden, uint first, threadgroup const AttentionRow* rows,
    const device T* mask, constant AttentionParams& params, uint lane) {
#pragma unroll
  for (uint i = 0; i < 2; ++i) {
#pragma unroll
    for (uint c = 0; c < C; ++c) {
      const bool sees = (hidden >> (2 * c + i) & 1) == 0;
      float score = scores.at[c][0][i];
      if (params.mask_kind == additive_mask) {
        const uint key = sees ? first + c * 8 + tile_row(lane) : 0;
        score =
            fma(float(mask[rows[tile_column(lane) + i].mask + key * uint(params.mask_key)]), score_unit<T>(), score);
      }
      scores.at[c][0][i] = sees ? score : -INFINITY;
    }
  }
}

// Before any key: a row's sink, if it has one. Of the simdgroups that share a row's keys only the first has it.
template <typename T>
inline OnlineSoftmax<T> first_state(
    const device T* sinks, AttentionPlace place, constant AttentionParams& params, uint worker) {
  OnlineSoftmax<T> state;
  state.m = float2(-INFINITY);
  state.l = float2(0.0f);
  if (params.has_sinks && worker == 0 && place.split == 0) {
#pragma unroll
    for (uint i = 0; i < 2; ++i) {
      const uint row = min(place.first + tile_column(place.lane) + i, place.rows - 1);
      const float sink = float(sinks[place.key_head * params.ratio + row / params.queries]) * score_unit<T>();
      state.m[i] = sink;
      state.l[i] = tile_row(place.lane) == 0 ? softmax_weight<T>(sink - finite_maximum(sink)) : 0.0f;
    }
  }
  return state;
}

}  // namespace mittens
