// A row of logits, or the part of one that a threadgroup has, by one threadgroup: sample.metal says how.
#pragma once

#include <metal_stdlib>

#include "sampling/draw.h"

using namespace metal;

namespace mittens {

// values and columns [list_size], scratch [2, 3, 32] and a counter, in threadgroup memory.
template <typename T>
inline void sample_row(
    const device T* x, const device uint* key, device uint* tokens, device float* logprobs, device uint* partials,
    constant SampleParams& params, uint group, uint t, uint threads, uint lane, uint simdgroup,
    threadgroup float* values, threadgroup uint* columns, threadgroup uint* scratch, threadgroup atomic_uint* count) {
  Team team{t, threads, lane, simdgroup, threads / 32, scratch, 0};

  const uint r = group / params.splits;
  const uint split = group % params.splits;
  const uint first = r * params.columns;
  Logits<T> logits;
  logits.row.row = x + first;
  logits.row.span = row_span<T>(params.phase + first % pack_size<T>(), params.columns);
  logits.row.first_pack = min(split * params.packs_per_split, logits.row.span.packs);
  logits.row.last_pack = min(logits.row.first_pack + params.packs_per_split, logits.row.span.packs);
  logits.row.edges = split == 0 ? logits.row.span.edges : 0;
  logits.list = InList{values, columns, threads};
  logits.listed = false;

  Draw draw;
  draw.least = -INFINITY;
  draw.edge = NAN;
  draw.last = no_column;
  draw.greedy = params.greedy;
  draw.inverse_temperature = params.inverse_temperature;
  draw.key = params.greedy ? uint2(0, 0) : uint2(key[0], key[1]);
  if (params.splits_key && !params.greedy) {
    draw.key = second_key(draw.key);
  }
  draw.first = first;
  draw.size = params.size;
  draw.best = Best{-INFINITY, no_column};

  const bool filters = params.top_k > 0 || params.top_p > 0 || params.has_min_p;
  float own = -INFINITY;
  float m = -INFINITY;
  ulong mass = 0;
  bool has_nan = false;
  if (filters || params.logprobs != kNoLogprobs) {
    own = largest_of(logits.row, team, has_nan);
    m = maximum_of(team, own);
    if (params.top_p > 0 || params.logprobs != kNoLogprobs) {
      mass = total_of(team, mass_in(logits.row, team, finite_maximum(m)));
    }
  }
  const bool of_all = params.logprobs == kAllLogprobs;
  if (of_all) {
    has_nan = maximum_of(team, has_nan ? 1.0f : 0.0f) > 0;
  }

  if (filters && m < INFINITY && m > -INFINITY) {
    const ulong part = ulong(params.top_p);
    const ulong mass_wanted = (mass >> 32) * part + ((mass & 0xffffffffu) * part >> 32);
    float bound = params.has_min_p ? round_to<T>(m + params.log_min_p) : -INFINITY;
    if (t == 0) {
      atomic_store_explicit(count, 0u, memory_order_relaxed);
    }
    values[t] = own;
    columns[t] = t;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    logits.listed = true;
    // Bounds from the maxima of the threads; where these say too little, from the row; then the thresholds themselves.
    float2 too_large = float2(INFINITY);
    bool ranked = false;
#pragma clang loop unroll(disable)
    for (uint step = 0; step < 6 && !ranked; ++step) {
      const bool counts = step % 2 == 1;
      const ulong wanted = counts ? ulong(params.top_k) : mass_wanted;
      const bool exact = step >= 4;
      if (step == 2) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        logits.listed = false;
      }
      if (step == 4) {
        if (bound > -INFINITY || params.columns <= list_size) {
          Gather gather{bound, values, columns, count};
          each(logits.row, team, gather);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          logits.list.count = atomic_load_explicit(count, memory_order_relaxed);
          logits.listed = logits.list.count <= list_size;
        }
        draw.least = bound;
        ranked = logits.listed && logits.list.count <= threads;
        if (ranked) {
          leave_kept(values, columns, logits.list.count, team, m, mass_wanted, params.top_k);
        }
      }
      const bool known = step == 2 || step == 3 ? bound > -INFINITY || params.columns <= list_size : ranked;
      if (wanted == 0 || known) {
        continue;
      }
      const Scale<T> scale{exact ? 0u : step < 2 ? 20u : 17u, m};
      const float upper = logits.listed ? INFINITY : counts ? too_large.y : too_large.x;
      const uint low = exact ? key_of<T>(bound) - 1 : 0;
      const uint high = exact ? min(key_of<T>(m) + 1, key_of<T>(upper)) : scale.last() + 1;
      const Threshold found = threshold_of(logits, team, counts, wanted, scale, low, high);
      if (!exact) {
        bound = max(bound, found.value);
        if (step >= 2) {
          too_large = counts ? float2(too_large.x, found.above) : float2(found.above, too_large.y);
        }
      } else if (!counts) {
        draw.least = max(draw.least, found.value);
      } else if (found.value > -INFINITY && found.value >= draw.least) {
        draw.least = found.value;
        if (found.sum > wanted) {
          draw.edge = found.value;
          draw.last = last_column(logits, team, found.value, wanted, params.columns);
        }
      }
    }
  }
  each(logits, team, draw);
  const Best best = best_of(team, draw.best);

  if (t == 0) {
    const float logit = best.column == no_column ? -INFINITY : number(float(logits.row.row[best.column]));
    if (params.splits > 1 || of_all) {
      device uint* partial = partials + group * partial_size;
      partial[0] = as_type<uint>(best.sum);
      partial[1] = best.column;
      partial[2] = as_type<uint>(logit);
      partial[3] = as_type<uint>(of_all && has_nan ? NAN : m);
      partial[4] = as_type<uint>(sum_of(mass));
    } else {
      tokens[r] = best.column == no_column ? 0 : best.column;
      if (params.logprobs == kTokenLogprobs) {
        logprobs[r] = (logit - m) - log_of(sum_of(mass));
      }
    }
  }
}

}  // namespace mittens
