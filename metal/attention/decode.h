// Attention of a few rows of queries that share keys and values: the heads of a group, and the tokens, of a decode
// step.
//
//   y = softmax(scale * q k^T + mask) v
//
// A key is shared by G lanes, 8 elements each, so that a simdgroup loads 32 / G keys at once, N of them on their way in
// each lane. The products of N keys with a block of rows are added up over the G lanes by halving exchanges, which
// leave each lane the scores of one row: one update of its maximum and sum serves all N keys, and what was summed up so
// far is rescaled only where a maximum grew. With the values each lane sums up V elements of every row.
//
#pragma once

#include "attention/attention.h"
#include "attention/seen_values.h"
#include "mittens/simd_reduce_scatter.h"

namespace mittens {

constant constexpr int decode_simdgroups = kDecodeSimdgroups;
constant constexpr uint decode_threads = decode_simdgroups * 32;

// How the work is cut for R rows of queries: a row block has few enough rows for one sum an exchange.
template <int G, int R>
struct DecodeShape {
  static constant constexpr int groups = 32 / G;                   // of lanes, a key each
  static constant constexpr int block = R < 4 ? R : 4;             // rows
  static constant constexpr int blocks = R / block;
  static constant constexpr int keys = R == 1 ? 8 : 4;             // of a lane
  static constant constexpr int tile = keys * groups;              // of a simdgroup
  static constant constexpr int scores = block * keys;
  static constant constexpr int own = scores > G ? scores / G : 1;  // scores of a lane, of one row
  static constant constexpr int copies = scores < G ? G / scores : 1;  // lanes with the same score
  static constant constexpr int row_lanes = G / block;
  static constant constexpr bool ahead = true;  // the next keys are on their way while the values are added up
  // With 16 rows a lane cannot hold 8 sums of each.
  static constant constexpr int value_lanes = R > 8 ? 2 * G : G;
  static constant constexpr int value_groups = 32 / value_lanes;
  static constant constexpr int value_elements = 8 * G / value_lanes;
  static constant constexpr int values = tile / value_groups;  // of a lane
  // Sums of a row lie in threadgroup memory by their place in the lanes, so far apart that no two banks meet.
  static constant constexpr int sum_stride = value_lanes + 4;
  static constant constexpr int sum_row = value_elements * sum_stride;
  static constant constexpr int columns = 8 * G;
};

// Over the lanes of all groups that have scores of the same row.
template <typename Shape>
inline float row_max(float v) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    if (mask < Shape::row_lanes || mask >= 32 / Shape::groups) {
      v = max(v, simd_shuffle_xor(v, ushort(mask)));
    }
  }
  return v;
}

template <typename Shape>
inline float row_sum(float v) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    if (mask < Shape::row_lanes || mask >= 32 / Shape::groups) {
      v += simd_shuffle_xor(v, ushort(mask));
    }
  }
  return v * (1.0f / Shape::copies);
}

// What a threadgroup shares, in float4: queries at first, sums in the end.
template <int G, int R>
constexpr int decode_scratch() {
  constexpr int queries = R * 8 * G;
  constexpr int sums = decode_simdgroups * DecodeShape<G, R>::block * DecodeShape<G, R>::sum_row;
  return (queries > sums ? queries : sums) / 4;
}

// Where a lane's elements start; those past the width stay on the first ones, which they then multiply by 0 or drop.
inline uint lane_elements(uint lane, int lanes, int elements, uint width) {
  const uint column = lane % lanes * elements;
  return column < width ? column : 0;
}

// What is at hand of a threadgroup's rows.
template <typename T>
struct DecodeRows {
  const device T* queries;
  const device T* mask;
  const device T* sinks;
  device T* y;
  uint batch;
  uint key_head;
  uint first;  // row of the key head's ratio * queries
  uint count;
};

// Which rows a threadgroup has.
template <typename T>
inline void place_rows(thread DecodeRows<T>& rows, uint3 group, int R, constant AttentionParams& params) {
  rows.batch = group.z / params.key_heads;
  rows.key_head = group.z % params.key_heads;
  rows.first = group.x * R;
  rows.count = min(params.ratio * params.queries - rows.first, uint(R));
}

template <typename T>
inline DecodeRows<T> decode_rows(
    const device T* queries, const device T* mask, const device T* sinks, device T* y, uint3 group, int R,
    constant AttentionParams& params) {
  DecodeRows<T> rows;
  place_rows(rows, group, R, params);
  rows.queries = queries + params.query_start + rows.batch * params.query_strides[0];
  rows.mask = mask;
  rows.sinks = sinks;
  rows.y = y;
  return rows;
}

// The rows for write_seen. They are found from the rows before, since ptxas takes more registers where decode_rows
// finds them from the group.
template <typename T>
inline DecodeRows<T> rows_anew(DecodeRows<T> rows, const device T* queries, int R, constant AttentionParams& params) {
  rows.batch = found_anew(rows.batch, params);
  rows.key_head = found_anew(rows.key_head, params);
  rows.first = found_anew(rows.first, params);
  rows.count = min(params.ratio * params.queries - rows.first, uint(R));
  rows.queries = queries + params.query_start + rows.batch * params.query_strides[0];
  return rows;
}

// Keys and values of a threadgroup's head.
template <typename T>
struct PlainHead {
  PlainRows<T> keys;
  PlainRows<T> values;
};

template <typename T>
inline PlainHead<T> plain_head(
    const device T* keys, const device T* values, DecodeRows<T> rows, constant AttentionParams& params) {
  PlainHead<T> head;
  head.keys = plain_rows(
      keys, head_offset(params.key_start, params.key_strides, rows.batch, rows.key_head), params.key_stride, params);
  head.values = plain_rows(
      values, head_offset(params.value_start, params.value_strides, rows.batch, rows.key_head), params.value_stride,
      params);
  return head;
}

// Row i, or the last one.
template <typename T>
inline ScoredRow scored_row(DecodeRows<T> rows, uint i, constant AttentionParams& params) {
  const uint row = rows.first + min(i, rows.count - 1);
  const uint head = rows.key_head * params.ratio + row / params.queries;
  const uint query = row % params.queries;
  const int64_t mask = params.mask_start + rows.batch * params.mask_strides[0] + head * params.mask_strides[1] +
      query * params.mask_strides[2];
  ScoredRow scored;
  scored.mask = (const device uchar*)rows.mask + mask * mask_item<T>(params);
  scored.position = int(query + params.keys) - int(params.queries);
  return scored;
}

// The queries of row i, or of the last one.
template <typename T>
inline const device T* query_of(DecodeRows<T> rows, uint i, constant AttentionParams& params) {
  const uint row = rows.first + min(i, rows.count - 1);
  const uint head = rows.key_head * params.ratio + row / params.queries;
  return rows.queries + head * params.query_strides[1] + row % params.queries * params.query_strides[2];
}

// The keys of a threadgroup, from the first on and up to the last: those that none of its rows sees are left out.
template <typename T>
inline uint2 key_range(DecodeRows<T> rows, uint split, constant AttentionParams& params) {
  uint begin = params.first_key + split * params.keys_per_split;
  uint end = min(begin + params.keys_per_split, params.keys);
  if (params.every_row_sees) {
    const uint query = rows.first % params.queries;
    const bool one_head = query + rows.count <= params.queries;
    const uint unseen = params.queries - (one_head ? query + rows.count : params.queries);
    end = min(end, params.keys - unseen);
    const uint seen = params.keys - params.queries + (one_head ? query : 0) + 1;
    if (params.window != 0 && seen > params.window) {
      begin = max(begin, seen - params.window);
    }
  }
  return uint2(begin, end);
}

// The keys before `end` that every row of a threadgroup sees, whatever it is: their scores stay as they are.
template <typename T>
inline uint2 open_range(DecodeRows<T> rows, uint end, constant AttentionParams& params) {
  if (params.mask != no_mask) {
    return uint2(0);
  }
  uint begin = 0;
  if (params.causal) {
    const uint query = rows.first % params.queries;
    const bool one_head = query + rows.count <= params.queries;
    const int least = int((one_head ? query : 0) + params.keys) - int(params.queries);
    const int most = least + int(one_head ? rows.count : params.queries) - 1;
    end = min(int(end), max(least + 1, 0));
    if (params.window != 0) {
      begin = max(most - int(params.window) + 1, 0);
    }
  }
  return uint2(begin, end);
}

// What the simdgroups have of a row, relative to the largest score of all.
struct RowTotal {
  float largest;
  float base;
  float weights[decode_simdgroups];  // of what each has summed up
  float denominator;
};

template <typename T>
inline RowTotal row_total(
    DecodeRows<T> rows, constant AttentionParams& params, uint row, threadgroup const float* maxima,
    threadgroup const float* totals) {
  RowTotal total;
  total.largest = maxima[row * decode_simdgroups];
#pragma unroll
  for (int s = 1; s < decode_simdgroups; ++s) {
    total.largest = max(total.largest, maxima[row * decode_simdgroups + s]);
  }
  float sink = -INFINITY;
  if (params.splits == 1 && params.has_sinks) {
    const uint head = rows.key_head * params.ratio + (rows.first + row) / params.queries;
    sink = float(rows.sinks[head]) * score_unit<T>();
    total.largest = max(total.largest, sink);
  }
  total.base = finite_maximum(total.largest);
  total.denominator = softmax_weight<T>(sink - total.base);
#pragma unroll
  for (int s = 0; s < decode_simdgroups; ++s) {
    total.weights[s] = softmax_weight<T>(maxima[row * decode_simdgroups + s] - total.base);
    total.denominator = fma(totals[row * decode_simdgroups + s], total.weights[s], total.denominator);
  }
  return total;
}

// An element of the result, or of a split's share of it.
template <typename T>
inline void write_element(
    DecodeRows<T> rows, constant AttentionParams& params, uint split, uint row, uint d, float sum, RowTotal total) {
  const size_t this_row =
      (size_t(rows.batch) * params.key_heads + rows.key_head) * params.ratio * params.queries + rows.first + row;
  if (params.splits == 1) {
    rows.y[this_row * params.width + d] = T(sum / total.denominator);
  } else {
    const size_t all_rows = size_t(params.heads) * params.queries * params.batches;
    device float* partials = (device float*)rows.y;
    partials[(split * all_rows + this_row) * params.width + d] = sum;
    if (d == 0) {
      device float* of_row = partials + params.splits * all_rows * params.width + this_row * params.splits + split;
      of_row[0] = total.largest;
      of_row[all_rows * params.splits] = total.denominator;
    }
  }
}

// What all simdgroups of a threadgroup left in `scratch` of the rows from `first_row` on, put together. V neighbouring
// columns lie Shape::sum_stride apart. Returns which of the thread's elements are left to write_seen, a bit for each:
// not those of a row whose denominator is NaN, which are NaN whatever their sums.
template <typename Shape, int V, typename T>
inline uint write_rows(
    DecodeRows<T> rows, constant AttentionParams& params, uint split, uint t, uint first_row,
    threadgroup const float* scratch, threadgroup const float* maxima, threadgroup const float* totals) {
  constexpr uint elements = Shape::block * Shape::columns;
  uint left = 0;
  for (uint from = 0; from < elements; from += decode_threads) {
    const uint i = from + t;
    if (elements % decode_threads != 0 && i >= elements) {
      break;
    }
    const uint row = first_row + i / Shape::columns;
    const uint d = i % Shape::columns;
    if (rows.first + row < params.ratio * params.queries && d < params.width) {
      const uint place = i / Shape::columns * Shape::sum_row + d % V * Shape::sum_stride + d / V;
      const RowTotal total = row_total(rows, params, row, maxima, totals);
      float sum = 0;
#pragma unroll
      for (int s = 0; s < decode_simdgroups; ++s) {
        sum = fma(scratch[s * Shape::block * Shape::sum_row + place], total.weights[s], sum);
      }
      write_element(rows, params, split, row, d, sum, total);
      const bool done = is_finite(sum) || is_nan(total.denominator);
      left |= (done ? 0u : 1u) << (first_row * Shape::columns + from) / decode_threads;
    }
  }
  return left;
}

// What write_rows left, of the keys that are seen. If one lane has an element left, all lanes of its simdgroup take
// part in its sum.
template <typename Shape, typename Rows, typename T>
inline void write_seen(
    DecodeRows<T> rows, Rows keys, Rows values, constant AttentionParams& params, uint split, uint t, uint left,
    threadgroup const float* maxima, threadgroup const float* totals) {
  for (uint i = found_anew(t, params); simd_any(left != 0); i += decode_threads, left >>= 1) {
    if (!simd_any(left % 2 != 0)) {
      continue;
    }
    const uint row = i / Shape::columns;
    const uint d = i % Shape::columns;
    const RowTotal total = row_total(rows, params, row, maxima, totals);
    const bool wanted = left % 2 != 0;
    const float sum = seen_sum(
        keys, values, query_of(rows, row, params), scored_row(rows, row, params), key_range(rows, split, params),
        total.base, min(d, params.width - 1), wanted, t % 32, params);
    if (wanted) {
      write_element(rows, params, split, row, d, sum, total);
    }
  }
}

// Returns what is left to write_seen.
template <typename Rows, typename T, int G, int R>
inline uint decode(
    DecodeRows<T> rows, Rows head_keys, Rows head_values, constant AttentionParams& params, uint3 group, uint t,
    uint lane, uint simdgroup, threadgroup float* scratch, threadgroup float* maxima, threadgroup float* totals) {
  using Shape = DecodeShape<G, R>;
  constexpr int N = Shape::keys;
  constexpr int V = Shape::value_elements;
  const Rows keys = at_column(head_keys, lane_elements(lane, G, 8, params.width));
  const Rows values = at_column(head_values, lane_elements(lane, Shape::value_lanes, V, params.width));
  const uint lane_group = lane / G;
  const uint value_group = lane / Shape::value_lanes;

  // Neither the end of this loop nor what the last one asks for stays in registers past the keys.
  for (uint from = 0; from < R * 8 * G; from += decode_threads) {
    const uint i = from + t;
    if (R * 8 * G % decode_threads != 0 && i >= R * 8 * G) {
      break;
    }
    const uint d = i % (8 * G);
    float q = 0;
    if (d < params.width) {
      q = float(query_of(rows, i / (8 * G), params)[d]);
    }
    // Lanes read the lower halves of their 8 elements side by side, then the upper ones.
    scratch[i - d + (d / 4 % 2) * 4 * G + d / 8 * 4 + d % 4] = q;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  ScoredRow scored[Shape::blocks];
  float maximum[Shape::blocks];
  float total[Shape::blocks];
#pragma unroll
  for (int b = 0; b < Shape::blocks; ++b) {
    scored[b] = scored_row(rows, b * Shape::block + lane % G / Shape::row_lanes, params);
    maximum[b] = -INFINITY;
    total[b] = 0;
  }
  float sums[R][V];
#pragma unroll
  for (int r = 0; r < R; ++r) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      sums[r][j] = 0;
    }
  }

  const uint split = group.y;
  const uint2 range = key_range(rows, split, params);
  const uint end = range.y;
  constexpr uint step = decode_simdgroups * Shape::tile;
  LoadedRows<Rows, 8, N> k;
  uint first = range.x + simdgroup * Shape::tile;
  if constexpr (Shape::ahead) {
    load_rows<Shape::groups>(keys, first + lane_group, end, first + Shape::tile <= end, k);
  }
  for (; first < end; first += step) {
    const bool whole = first + Shape::tile <= end;
    if constexpr (!Shape::ahead) {
      load_rows<Shape::groups>(keys, first + lane_group, end, whole, k);
    }
    LoadedRows<Rows, V, Shape::values> v;
    load_rows<Shape::value_groups>(values, first + value_group, end, whole, v);

    float scores[Shape::blocks][Shape::own];
    float raised[Shape::blocks];
    bool grew = false;
#pragma unroll
    for (int b = 0; b < Shape::blocks; ++b) {
      float products[Shape::scores];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float key[8];
        widen(k.at[n], key);
#pragma unroll
        for (int r = 0; r < Shape::block; ++r) {
          threadgroup const float4* query =
              (threadgroup const float4*)(scratch + (b * Shape::block + r) * 8 * G) + lane % G;
          const float4 low = query[0];
          const float4 high = query[G];
          float product = 0;
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            product = fma(low[j], key[j], product);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            product = fma(high[j], key[j + 4], product);
          }
          products[r * N + n] = product;
        }
      }
      exchange<Shape::scores, G / 2>(products, lane);
      raised[b] = maximum[b];
#pragma unroll
      for (int i = 0; i < Shape::own; ++i) {
        const uint n = (lane % G / Shape::copies * Shape::own + i) % N;
        const uint key = first + n * Shape::groups + lane_group;
        scores[b][i] = -INFINITY;
        if (key < end) {
          scores[b][i] = masked_score<T>(products[i] * params.scale, key, scored[b], params);
        }
        raised[b] = max(raised[b], scores[b][i]);
      }
      raised[b] = row_max<Shape>(raised[b]);
      grew = grew || raised[b] > maximum[b];
    }

    if constexpr (Shape::ahead) {
      const uint next = first + step;
      load_rows<Shape::groups>(keys, next + lane_group, end, next + Shape::tile <= end, k);
    }

    if (simd_any(grew)) {
#pragma unroll
      for (int b = 0; b < Shape::blocks; ++b) {
        const float factor = softmax_weight<T>(maximum[b] - finite_maximum(raised[b]));
        maximum[b] = raised[b];
        total[b] *= factor;
#pragma unroll
        for (int r = 0; r < Shape::block; ++r) {
          const float row_factor = simd_shuffle(factor, ushort(r * Shape::row_lanes));
#pragma unroll
          for (int j = 0; j < V; ++j) {
            sums[b * Shape::block + r][j] *= row_factor;
          }
        }
      }
    }
#pragma unroll
    for (int b = 0; b < Shape::blocks; ++b) {
      const float base = finite_maximum(maximum[b]);
#pragma unroll
      for (int i = 0; i < Shape::own; ++i) {
        scores[b][i] = softmax_weight<T>(scores[b][i] - base);
        total[b] += scores[b][i];
      }
    }

    constexpr int spread = Shape::value_lanes / G;
#pragma unroll
    for (int n = 0; n < Shape::values; ++n) {
      float value[V];
      widen(v.at[n], value);
      const uint from = (n % spread * Shape::value_groups + value_group) * G;
#pragma unroll
      for (int b = 0; b < Shape::blocks; ++b) {
#pragma unroll
        for (int r = 0; r < Shape::block; ++r) {
          const int score = r * N + n / spread;
          const float p = simd_shuffle(
              scores[b][score % Shape::own], ushort(from + score / Shape::own * Shape::copies));
#pragma unroll
          for (int j = 0; j < V; ++j) {
            sums[b * Shape::block + r][j] = fma(p, value[j], sums[b * Shape::block + r][j]);
          }
        }
      }
    }
  }

  // What the simdgroups have of a row, each from its own maximum, becomes one.
#pragma unroll
  for (int b = 0; b < Shape::blocks; ++b) {
    const float row_total = row_sum<Shape>(total[b]);
    if (lane < G && lane % Shape::row_lanes == 0) {
      const uint row = b * Shape::block + lane / Shape::row_lanes;
      maxima[row * decode_simdgroups + simdgroup] = maximum[b];
      totals[row * decode_simdgroups + simdgroup] = row_total;
    }
  }
  place_rows(rows, found_anew(group, params), R, params);
  uint left = 0;
#pragma unroll
  for (int b = 0; b < Shape::blocks; ++b) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
#pragma unroll
    for (int r = 0; r < Shape::block; ++r) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        float sum = sums[b * Shape::block + r][j];
#pragma unroll
        for (int mask = 16; mask >= Shape::value_lanes; mask /= 2) {
          sum += simd_shuffle_xor(sum, ushort(mask));
        }
        if (lane < Shape::value_lanes) {
          scratch[(simdgroup * Shape::block + r) * Shape::sum_row + j * Shape::sum_stride + lane] = sum;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    left |= write_rows<Shape, V>(rows, params, split, simdgroup * 32 + lane, b * Shape::block, scratch, maxima, totals);
  }
  return left;
}

}  // namespace mittens
