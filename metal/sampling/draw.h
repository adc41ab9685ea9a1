// How a threadgroup finds the logits of a row that the filters keep, and draws from them.
#pragma once

#include <metal_stdlib>

#include "mittens/row_io.h"
#include "mittens/threefry.h"
#include "params/sampling.h"
#include "sampling/partials.h"

using namespace metal;

namespace mittens {

constant constexpr uint sample_threads = kSampleThreads;
constant constexpr uint list_size = 2048;

// ---- mathematics; csrc/cpu/isa/sampling/sample.cpp has the same, operation for operation ----

// Gumbel noise of 32 random bits: -log(-log(bits / 2^32)). The quotient stays below 1, and is 2^-33 for bits 0.
inline float gumbel(uint bits) {
  const float u = bits == 0 ? 0x1p-33f : min(float(bits) * 0x1p-32f, 0x1.fffffep-1f);
  return -log_of(-log_of(u));
}
constant constexpr float most_gumbel = 16.636f;

// e^d for d <= 0 in units of 2^-44: x of 2^22 of them and y. Sums with 3/2 of a power of two round to whole numbers,
// which are then in the lowest bits.
inline int2 parts_of(float difference) {
  const float d = max(difference, -40.0f);  // from there on it is 0
  const float shifted = fma(d, 0x1.715476p0f, 0x1.8p23f);
  const float n = shifted - 0x1.8p23f;
  float r = fma(n, -0x1.62e4p-1f, d);
  r = fma(n, -0x1.7f7d1cp-20f, r);
  float p = fma(r, 0x1.6a2434p-10f, 0x1.1239e2p-7f);
  p = fma(p, r, 0x1.5558f2p-5f);
  p = fma(p, r, 0x1.555492p-3f);
  p = fma(p, r, 0x1.fffffcp-2f);
  const float near = fma(p * r, r, r) + 1.0f;
  const float e = as_type<float>(as_type<uint>(near) + (as_type<uint>(shifted) << 23));
  const float high = e + 0x1.8p1f;
  const float low = (e - (high - 0x1.8p1f)) + 0x1.8p-21f;
  return int2(as_type<int>(high) - 0x40400000, as_type<int>(low) - 0x35400000);
}

inline ulong mass_of(int2 parts) {
  return ulong((long(parts.x) << 22) + long(parts.y));
}

inline float sum_of(ulong mass) {
  return float(uint(mass >> 32)) * 0x1p-12f + float(uint(mass)) * 0x1p-44f;
}

// Whole numbers in the order of the floats: one step for each number of T.
template <typename T>
inline uint key_of(float v) {
  const uint bits = as_type<uint>(v);
  const uint ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return ordered >> (is_same_v<T, float> ? 0 : is_same_v<T, half> ? 13 : 16);
}

template <typename T>
inline float value_of(uint key) {
  constexpr uint shift = is_same_v<T, float> ? 0 : is_same_v<T, half> ? 13 : 16;
  const uint ordered = key << shift;
  const uint bits = ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered & (0xffffffffu << shift);
  return as_type<float>(bits);
}

// ---- a threadgroup ----

struct Team {
  uint t;
  uint threads;
  uint lane;
  uint simdgroup;
  uint simdgroups;
  threadgroup uint* scratch;  // [2, 3, 32]: two results may be on their way
  uint turn;
};

inline threadgroup uint* next_scratch(thread Team& team) {
  team.turn ^= 1;
  return team.scratch + team.turn * 96;
}

inline float maximum_of(thread Team& team, float v) {
  threadgroup uint* parts = next_scratch(team);
  v = simd_max(v);
  if (team.lane == 0) {
    parts[team.simdgroup] = as_type<uint>(v);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return simd_max(team.lane < team.simdgroups ? as_type<float>(parts[team.lane]) : -INFINITY);
}

// In three parts of 22 bits, whose sums do not overflow.
inline ulong total_of(thread Team& team, ulong v) {
  threadgroup uint* parts = next_scratch(team);
#pragma unroll
  for (uint i = 0; i < 3; ++i) {
    const uint part = simd_sum(uint(v >> (22 * i)) & 0x3fffffu);
    if (team.lane == 0) {
      parts[i * 32 + team.simdgroup] = part;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  ulong total = 0;
#pragma unroll
  for (uint i = 0; i < 3; ++i) {
    total += ulong(simd_sum(team.lane < team.simdgroups ? parts[i * 32 + team.lane] : 0u)) << (22 * i);
  }
  return total;
}

inline Best best_of(thread Team& team, Best best) {
  threadgroup uint* parts = next_scratch(team);
  best = best_of_simdgroup(best);
  if (team.lane == 0) {
    parts[team.simdgroup] = as_type<uint>(best.sum);
    parts[32 + team.simdgroup] = best.column;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const bool there = team.lane < team.simdgroups;
  return best_of_simdgroup(
      Best{there ? as_type<float>(parts[team.lane]) : -INFINITY, there ? parts[32 + team.lane] : no_column});
}

// ---- operations on each logit ----

// Each has `take`, and `wants`, which may say of the largest of several logits that none of them needs to be taken.
// How many logits, or how much of the exponentials, are at a value or above.
struct Above {
  float least;
  float m;
  bool counts;
  ulong sum;
  bool wants(float largest) const {
    return largest >= least;
  }
  void take(float x, uint) {
    if (x >= least) {
      sum += counts ? ulong(1) : mass_of(parts_of(x - m));
    }
  }
};

// How many logits come before the logits of a value after a column.
struct Before {
  float value;
  uint last;
  ulong sum;
  bool wants(float largest) const {
    return largest >= value;
  }
  void take(float x, uint column) {
    sum += x > value || (x == value && column <= last) ? 1 : 0;
  }
};

struct Gather {
  float least;
  threadgroup float* values;
  threadgroup uint* columns;
  threadgroup atomic_uint* count;
  bool wants(float largest) const {
    return largest >= least;
  }
  void take(float x, uint column) {
    if (x >= least) {
      const uint i = atomic_fetch_add_explicit(count, 1u, memory_order_relaxed);
      if (i < list_size) {
        values[i] = x;
        columns[i] = column;
      }
    }
  }
};

struct Draw {
  float least;
  float edge;  // of the logits with this value those after the last column are left out
  uint last;
  bool greedy;
  float inverse_temperature;
  uint2 key;
  uint first;  // the row's place in the array
  uint size;
  Best best;
  bool wants(float largest) const {
    return largest >= least && !(fma(largest, inverse_temperature, greedy ? 0.0f : most_gumbel) < best.sum);
  }
  void take(float x, uint column) {
    if (!wants(x) || (x == edge && column > last)) {
      return;
    }
    const float noise = greedy ? 0.0f : gumbel(random_bits(key, first + column, size));
    const float sum = fma(x, inverse_temperature, noise);
    if (is_better(sum, column, best)) {
      best = Best{sum, column};
    }
  }
};

// ---- where logits are ----

// Part of a row in memory.
template <typename T>
struct InRow {
  const device T* row;
  RowSpan span;
  uint first_pack;
  uint last_pack;
  uint edges;
};

// In threadgroup memory.
struct InList {
  const threadgroup float* values;
  const threadgroup uint* columns;
  uint count;
};

// Turn i of a thread: a pack, or an element at the ends of the row, alone in its pack.
template <typename T>
inline uint4 fetched(InRow<T> in, uint i) {
  return i < in.last_pack ? load_pack(in.row + in.span.head + i * pack_size<T>(), true)
                          : pack_of<T>(float(in.row[edge_column<T>(in.span, i - in.last_pack)]));
}

// The largest logit that a thread reads, and whether it reads a NaN. Several packs are on their way at once.
template <typename T>
inline float largest_of(InRow<T> in, Team team, thread bool& has_nan) {
  float m = -INFINITY;
#pragma clang loop unroll_count(2)
  for (uint i = in.first_pack + team.t; i < in.last_pack + in.edges; i += team.threads) {
    float v[16 / sizeof(T)];
    unpack<T>(fetched(in, i), v);
#pragma unroll
    for (uint j = 0; j < 16 / sizeof(T); ++j) {
      m = max(m, number(v[j]));
      has_nan = has_nan || !(v[j] == v[j]);
    }
  }
  return m;
}

// The exponentials of the logits that a thread reads.
template <typename T>
inline ulong mass_in(InRow<T> in, Team team, float m) {
  ulong sum = 0;
#pragma clang loop unroll(disable)
  for (uint i = in.first_pack + team.t; i < in.last_pack + in.edges; i += team.threads) {
    const uint count = i < in.last_pack ? 16 / sizeof(T) : 1;
    float v[16 / sizeof(T)];
    unpack<T>(fetched(in, i), v);
    int2 parts = int2(0);
#pragma unroll
    for (uint j = 0; j < 16 / sizeof(T); ++j) {
      parts += parts_of(j < count ? v[j] - m : -INFINITY);
    }
    sum += mass_of(parts);
  }
  return sum;
}

template <typename T, typename Visitor>
inline void each(InRow<T> in, Team team, thread Visitor& visitor) {
  constexpr uint W = 16 / sizeof(T);
#pragma clang loop unroll(disable)
  for (uint i = in.first_pack + team.t; i < in.last_pack + in.edges; i += team.threads) {
    uint4 bits = fetched(in, i);
    float v[W];
    unpack<T>(bits, v);
    float largest = -INFINITY;
#pragma unroll
    for (uint j = 0; j < W; ++j) {
      largest = max(largest, number(v[j]));
    }
    if (!visitor.wants(largest)) {
      continue;
    }
    // Not unrolled, since the operation on a logit may be long: the next element is always in the lowest bits.
    const bool is_pack = i < in.last_pack;
    const uint column = is_pack ? in.span.head + i * W : edge_column<T>(in.span, i - in.last_pack);
    const uint count = is_pack ? W : 1;
#pragma clang loop unroll(disable)
    for (uint j = 0; j < count; ++j) {
      unpack<T>(uint4(bits.x, 0, 0, 0), v);
      visitor.take(number(v[0]), column + j);
      if (sizeof(T) == 4 || j % 2 == 1) {
        bits = uint4(bits.y, bits.z, bits.w, bits.x);
      } else {
        bits.x >>= 16;
      }
    }
  }
}

template <typename Visitor>
inline void each(InList in, Team team, thread Visitor& visitor) {
  for (uint i = team.t; i < in.count; i += team.threads) {
    visitor.take(in.values[i], in.columns[i]);
  }
}

// The list, or the row where the list has too little room.
template <typename T>
struct Logits {
  InRow<T> row;
  InList list;
  bool listed;
};

template <typename T, typename Visitor>
inline void each(Logits<T> in, Team team, thread Visitor& visitor) {
  if (in.listed) {
    each(in.list, team, visitor);
  } else {
    each(in.row, team, visitor);
  }
}

// The largest value of a scale at or above which there is as much as is wanted, and how much; -inf where there is none.
// `above` is the least value that was seen to be too large.
struct Threshold {
  float value;
  ulong sum;
  float above;
};

// The numbers of T, or the distances from the largest logit, which have fewer bits.
template <typename T>
struct Scale {
  uint shift;  // 0: the numbers themselves
  float m;
  uint last() const {
    return 0x7f800000u >> shift;
  }
  float at(uint i) const {
    return shift == 0 ? value_of<T>(i) : m - as_type<float>((last() - i) << shift);
  }
};

template <typename T>
inline Threshold threshold_of(
    Logits<T> logits, thread Team& team, bool counts, ulong wanted, Scale<T> scale, uint low, uint high) {
  Threshold found{-INFINITY, 0, INFINITY};
  while (high > low + 1) {
    const uint middle = low + (high - low) / 2;
    Above above{scale.at(middle), scale.m, counts, 0};
    each(logits, team, above);
    const ulong sum = total_of(team, above.sum);
    if (sum >= wanted) {
      low = middle;
      found.value = above.least;
      found.sum = sum;
    } else {
      high = middle;
      found.above = above.least;
    }
  }
  return found;
}

// The column up to which logits of a value are kept, so that they and larger ones are as many as are wanted.
template <typename T>
inline uint last_column(Logits<T> logits, thread Team& team, float value, ulong wanted, uint columns) {
  uint low = 0;
  uint high = columns - 1;
  while (low < high) {
    const uint middle = low + (high - low) / 2;
    Before before{value, middle, 0};
    each(logits, team, before);
    if (total_of(team, before.sum) >= wanted) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Leaves the logits of a list that pass top-p and top-k, and -inf for others. The list has at most one for each thread,
// which compares it with all. Their exponentials go behind the columns.
inline void leave_kept(
    threadgroup float* values, threadgroup uint* columns, uint count, Team team, float m, ulong mass_wanted,
    uint top_k) {
  const bool mine = team.t < count;
  const float x = mine ? values[team.t] : -INFINITY;
  const uint column = mine ? columns[team.t] : no_column;
  threadgroup uint* masses = columns + sample_threads;
  if (mine && mass_wanted > 0) {
    const ulong mass = mass_of(parts_of(x - m));
    masses[2 * team.t] = uint(mass);
    masses[2 * team.t + 1] = uint(mass >> 32);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint before = 0;
  ulong mass_before = 0;
  for (uint i = 0; mine && i < count; ++i) {
    const float other = values[i];
    before += other > x || (other == x && columns[i] < column) ? 1 : 0;
    if (mass_wanted > 0 && other > x) {
      mass_before += (ulong(masses[2 * i + 1]) << 32) | ulong(masses[2 * i]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (mine && ((top_k > 0 && before >= top_k) || (mass_wanted > 0 && mass_before >= mass_wanted))) {
    values[team.t] = -INFINITY;
  }
}

}  // namespace mittens
