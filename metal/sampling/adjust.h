// Penalties for the last tokens of a row, and a mask of the tokens that may be drawn:
//
//   y[r, c] = -inf where bit c of mask[r] is 0, else
//   x = x[r, c], and where c is among the tokens of r:
//     x = x < 0 ? x * repetition : x / repetition       once, and not where repetition is 0
//     x = x - presence                                  once
//     x = x - frequency                                 for each time that it is there
//
// Each step is rounded to the type, and so are the penalties, as by mlx-lm's processors. A token outside of the row
// changes nothing. A threadgroup copies its part of the row, and then rewrites the logits of its tokens. It counts
// these in device memory, where it sets to 0 the counts of its tokens alone.
#pragma once

#include <metal_stdlib>

#include "mittens/pack.h"
#include "mittens/row_io.h"
#include "params/sampling.h"

using namespace metal;

namespace mittens {

// Of a token's count: flags, and from there on how often it is among the tokens with the frequency's penalty.
constant constexpr uint is_repeated = 1;
constant constexpr uint is_present = 2;
constant constexpr uint is_taken = 4;  // a thread writes the logit
constant constexpr uint one_occurrence = 8;

struct Adjustments {
  const device uint* tokens;       // [rows or 1, tokens], of one or two words
  const device uint* mask;         // [rows or 1, words]
  const device float* repetition;  // [rows or 1], and so the other penalties
  const device float* presence;
  const device float* frequency;
};

// The token at a place among a row's, or the number of columns for one outside of the row.
inline uint token_at(const device uint* tokens, uint i, uint words, uint columns) {
  const device uint* token = tokens + ulong(i) * words;
  const bool inside = token[0] < columns && (words == 1 || token[1] == 0);
  return inside ? token[0] : columns;
}

template <typename T>
inline float penalty_of(const device float* numbers, PenaltyParams penalty, uint r) {
  return penalty.is_given ? round_to<T>(numbers[r * penalty.step]) : penalty.value;
}

// x after the penalties of a token with such a count.
template <typename T>
inline float penalized(float x, uint count, Adjustments given, constant AdjustParams& params, uint r) {
  if ((count & is_repeated) != 0) {
    const float penalty = penalty_of<T>(given.repetition, params.repetition, r);
    const bool is_none = params.repetition.is_given && given.repetition[r * params.repetition.step] == 0;
    x = is_none ? x : round_to<T>(x < 0 ? x * penalty : x / penalty);
  }
  if ((count & is_present) != 0) {
    x = round_to<T>(x - penalty_of<T>(given.presence, params.presence, r));
  }
  const float penalty = count >= one_occurrence ? penalty_of<T>(given.frequency, params.frequency, r) : 0.0f;
#pragma clang loop unroll(disable)
  for (uint i = one_occurrence; i <= count; i += one_occurrence) {
    x = round_to<T>(x - penalty);
  }
  return x;
}

inline bool is_allowed(const device uint* mask, bool has_mask, uint column) {
  return !has_mask || ((mask[column / 32] >> (column % 32)) & 1) != 0;
}

// The bits of the columns of a pack in the lowest ones.
inline uint allowed_from(const device uint* mask, uint column, uint count) {
  const uint shift = column % 32;
  uint bits = mask[column / 32] >> shift;
  if (shift + count > 32) {
    bits |= mask[column / 32 + 1] << (32 - shift);
  }
  return bits;
}

// x and y are rows, y on a boundary of 16 bytes where the first of all is. counts [columns].
template <typename T>
inline void adjust_row(
    const device T* x, device T* y, device atomic_uint* counts, Adjustments given, constant AdjustParams& params,
    uint r, uint split, uint t, uint threads) {
  constexpr uint W = pack_size<T>();
  const uint columns = params.columns;
  const ulong first = ulong(r) * columns;
  const uint phase = uint(first % W);
  const RowSpan span = row_span<T>(phase, columns);
  const uint first_pack = min(split * params.packs_per_split, span.packs);
  const uint last_pack = min(first_pack + params.packs_per_split, span.packs);
  const uint edges = split == 0 ? span.edges : 0;
  const bool aligned = packs_aligned<T>(params.phase + phase, span);
  const device uint* mask = given.mask + r * params.mask_step;
  x += first;
  y += first;
  counts += first;

  for (uint i = first_pack + t; i < last_pack + edges; i += threads) {
    if (i < last_pack) {
      const uint column = span.head + i * W;
      uint4 bits = load_pack(x + column, aligned);
      if (params.has_mask) {
        const uint allowed = allowed_from(mask, column, W);
        float v[W];
        unpack<T>(bits, v);
#pragma unroll
        for (uint j = 0; j < W; ++j) {
          v[j] = (allowed >> j) & 1 ? v[j] : -INFINITY;
        }
        bits = pack<T>(v);
      }
      store_pack(y + column, true, bits);
    } else {
      const uint column = edge_column<T>(span, i - last_pack);
      y[column] = is_allowed(mask, params.has_mask, column) ? x[column] : T(-INFINITY);
    }
  }

  // Counts become 0; then all tokens are counted; then the first thread to take one writes its logit.
  const device uint* tokens = given.tokens + ulong(r) * params.token_step * params.token_words;
  const uint pack_columns = span.packs * W;
#pragma clang loop unroll(disable)
  for (uint pass = 0; params.context > 0 && pass < 3; ++pass) {
    threadgroup_barrier(mem_flags::mem_device);
#pragma clang loop unroll(disable)
    for (uint i = params.tokens - params.context + t; i < params.tokens; i += threads) {
      const uint column = token_at(tokens, i, params.token_words, columns);
      const uint in_packs = column - span.head;  // large in the head
      const uint pack = in_packs / W;
      const bool mine = in_packs < pack_columns ? pack >= first_pack && pack < last_pack : split == 0;
      if (column >= columns || !mine) {
        continue;
      }
      device atomic_uint* count = counts + column;
      if (pass == 0) {
        atomic_store_explicit(count, 0u, memory_order_relaxed);
      } else if (pass == 1) {
        const uint age = params.tokens - i;
        const uint added = age <= params.frequency.context ? one_occurrence : 0u;
        const uint flags =
            (age <= params.repetition.context ? is_repeated : 0u) | (age <= params.presence.context ? is_present : 0u);
        if (added > 0) {
          atomic_fetch_add_explicit(count, added, memory_order_relaxed);
        }
        if (flags > 0) {
          atomic_fetch_or_explicit(count, flags, memory_order_relaxed);
        }
      } else {
        const uint found = atomic_fetch_or_explicit(count, is_taken, memory_order_relaxed);
        if ((found & is_taken) == 0 && is_allowed(mask, params.has_mask, column)) {
          y[column] = T(penalized<T>(float(x[column]), found, given, params, r));
        }
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_device);
}

}  // namespace mittens
