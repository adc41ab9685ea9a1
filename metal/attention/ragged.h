// The keys of each row of a batch: from its start to its end, in the place of EveryKey.
#pragma once

#include "attention/attention.h"

namespace mittens {

// Starts [batch] or [batch, queries], ends [batch]. Rows with a range outside of the keys are NaN, and nothing is read.
struct RowKeys {
  const device int* starts;  // of the row
  uint keys;
  uint start_query;
  bool has_starts;
  uint begin;  // of all queries
  uint limit;
  bool is_sound;

  bool is_key(int at) const {
    return at >= 0 && uint(at) <= keys;
  }

  bool is_sound_for(uint query) const {
    return is_sound && (!has_starts || is_key(starts[query * start_query]));
  }

  // Threadgroups share the keys that some query's window has, in whole steps. Shares of a fixed size, which exact calls
  // have, begin at the row's first key: its sums are then in the order of a batch of this row alone.
  KeyShare share(AttentionPlace place, constant AttentionParams& params, uint step) const {
    uint first = begin;
    uint size = params.keys_per_split;
    if (size == 0) {
      const uint own = limit - begin;
      const uint seen = params.window + params.queries - 1;
      const uint skipped = params.window != 0 && own > seen ? (own - seen) / step * step : 0;
      first += skipped;
      size = (own - skipped + params.splits * step - 1) / (params.splits * step) * step;
    }
    first += place.split * size;
    return KeyShare{first, min(first + size, limit), limit};
  }

  uint first_of(uint query, KeyShare share) const {
    return has_starts && start_query != 0 && is_sound_for(query) ? max(uint(starts[query]), share.first) : share.first;
  }

  uint end(constant AttentionParams& params) const {
    return limit;
  }

  uint aligned(uint key, KeyShare share, uint step) const {
    return share.first + (key - share.first) / step * step;
  }

  template <typename T>
  void refuse(
      thread OnlineSoftmax<T>& state, AttentionPlace place, constant AttentionParams& params, uint worker) const {
    const bool counts = worker == 0 && place.split == 0;
    const uint row = place.first + tile_column(place.lane);
    const bool upper = counts && !is_sound_for(min(row, place.rows - 1) % params.queries);
    const bool lower = counts && !is_sound_for(min(row + 1, place.rows - 1) % params.queries);
    state.l += float2(upper ? NAN : 0.0f, lower ? NAN : 0.0f);
  }
};

inline RowKeys row_keys(
    const device int* starts, const device int* ends, AttentionPlace place, constant RaggedAttentionParams& params) {
  RowKeys row;
  row.starts = starts + place.batch * params.start_batch;
  row.keys = params.attention.keys;
  row.start_query = params.start_query;
  row.has_starts = params.has_starts != 0;
  const int first = row.has_starts && row.start_query == 0 ? row.starts[0] : 0;
  const int last = params.has_ends ? ends[place.batch] : int(row.keys);
  row.is_sound = row.is_key(first) && row.is_key(last);
  row.limit = row.is_sound ? uint(last) : 0;
  row.begin = row.is_sound ? min(uint(first), row.limit) : 0;
  return row;
}

}  // namespace mittens
