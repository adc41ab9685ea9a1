// Products of a few rows of x with GGUF blocks as a .gguf file stores them:
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n],   w[n, k] = d * (q - zero), d shared by 32 k
//
// A block is a half d, then 16 bytes of 4-bit integers (q4_0: 18 bytes) or 32 signed bytes (q8_0: 34). Each lane
// multiplies one block; since blocks start on any even byte, a simdgroup first brings the 32 blocks of a row in by
// whole words, neighbours by neighbours, and lanes pick theirs up from threadgroup memory. Otherwise as
// quantized_rows.metal.
#include <metal_stdlib>

#include "mittens/instantiate.h"
#include "mittens/products.h"
#include "params/blocks.h"

using namespace metal;
using namespace mittens;

constant constexpr int block_columns = 32;

template <Format F>
constexpr int block_bytes() {
  return 2 + block_columns * bits_of<F>() / 8;
}

// Words of 32 blocks that start on any even byte, and how many of the whole ones each lane brings in: lane 0 may begin
// up to 31 words before them.
template <Format F>
constexpr int tile_words() {
  return 8 * block_bytes<F>() + 1;
}
template <Format F>
constexpr int lane_words() {
  return (8 * block_bytes<F>() + 31 + 31) / 32;
}

// Packs of threadgroup memory that a simdgroup has for B tiles, and for its activations before them.
template <Format F, int B>
constexpr int scratch_size() {
  return (B * tile_words<F>() + 3) / 4;
}

// The same columns of all rows: up to 32 blocks of each.
struct Tiles {
  const device uchar* blocks;
  size_t first;  // byte of the first row's tile
  size_t row_bytes;
  uint size;   // bytes of a tile
  uint ahead;  // words from the start of a line to the tile, where rows are whole lines of 128 bytes; else 0
};

// Which of a tile's whole words, if any, is the i-th of a lane. Where rows are whole lines, the 32 that lanes load at
// once are of one line; elsewhere that would need an answer for each row, and a fifth more instructions.
inline uint word_of(Tiles tiles, uint lane, int i) {
  return lane + 32 * i - tiles.ahead;
}

inline uint phase_of(Tiles tiles, uint row) {
  return uint(tiles.first + row * tiles.row_bytes) % 4;
}

// A lane's share of B tiles on their way to threadgroup memory: words, and the two halves of what follows the last
// whole one, 0 where the tile has ended.
template <Format F, int B>
struct TileShare {
  uint words[B][lane_words<F>()];
  ushort tails[B];
};

template <Format F, int B>
inline void load_tiles(Tiles tiles, uint row, uint lane, thread TileShare<F, B>& share) {
#pragma unroll
  for (int r = 0; r < B; ++r) {
    const uint phase = phase_of(tiles, row + r);
    const device uchar* start = tiles.blocks + (tiles.first + (row + r) * tiles.row_bytes - phase);
    const device uint* own = (const device uint*)start + (int(lane) - int(tiles.ahead));
#pragma unroll
    for (int i = 0; i < lane_words<F>(); ++i) {
      if (word_of(tiles, lane, i) < tiles.size / 4) {
        share.words[r][i] = own[32 * i];
      }
    }
    share.tails[r] = 0;
    if (lane < (phase + tiles.size % 4) / 2) {
      share.tails[r] = ((const device ushort*)start)[tiles.size / 4 * 2 + lane];
    }
  }
}

template <Format F, int B>
inline void store_tiles(
    thread const TileShare<F, B>& share, Tiles tiles, uint lane, threadgroup uint* own) {
#pragma unroll
  for (int r = 0; r < B; ++r) {
    threadgroup uint* tile = own + r * tile_words<F>();
#pragma unroll
    for (int i = 0; i < lane_words<F>(); ++i) {
      if (word_of(tiles, lane, i) < tiles.size / 4) {
        tile[word_of(tiles, lane, i)] = share.words[r][i];
      }
    }
    if (lane < 2) {
      ((threadgroup ushort*)tile)[tiles.size / 4 * 2 + lane] = share.tails[r];
    }
  }
}

// Takes this lane's block out of a tile in threadgroup memory: its integers, and d.
template <Format F>
inline float take_block(
    threadgroup const uint* tile, uint phase, uint lane, thread uint (&words)[bits_of<F>()]) {
  const uint byte = phase + lane * block_bytes<F>();
  const bool whole = byte % 4 == 2;  // the integers start on a word
  uint w[bits_of<F>() + 1];
#pragma unroll
  for (int i = 0; i < bits_of<F>() + 1; ++i) {
    w[i] = tile[byte / 4 + i];
  }
#pragma unroll
  for (int i = 0; i < bits_of<F>(); ++i) {
    words[i] = whole ? w[i + 1] : (w[i] >> 16) | (w[i + 1] << 16);
    if (F == q8_0) {
      words[i] ^= 0x80808080u;
    }
  }
  return float(as_type<half>(ushort(whole ? w[0] >> 16 : w[0] & 0xffffu)));
}

// Lets rows first .. end pass by, B at a time; `share` is of the first of them.
template <typename T, Format F, bool exact, int M, int B>
inline void pass_blocks(
    thread const Activations<block_columns, M>& a, bool inside, Tiles tiles, thread TileShare<F, B>& share, uint first,
    uint end, uint two23, threadgroup uint* own, Gathering to) {
  for (; first < end; first += B) {
    simdgroup_barrier(mem_flags::mem_threadgroup);  // all lanes have taken their blocks of the tiles before
    store_tiles<F, B>(share, tiles, to.lane, own);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (first + B < end) {
      load_tiles<F, B>(tiles, first + B, to.lane, share);
    }
    float totals[B * M];
    clear(totals);
    if (inside) {
#pragma unroll
      for (int r = 0; r < B; ++r) {
        uint block[bits_of<F>()];
        float sums[M];
        const float d = take_block<F>(own + r * tile_words<F>(), phase_of(tiles, first + r), to.lane, block);
        multiply_words<F, exact, bits_of<F>(), M>(a, block, two23, sums);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          totals[r * M + m] = d * sums[m];
        }
      }
    }
    gather(totals, to, first * M);
  }
}

template <typename T, Format F, int M, int B>
[[kernel, max_total_threads_per_threadgroup(M > 1 ? 256 : 384)]] void block_matmul(
    const device T* x [[buffer(0)]],           // [rows, columns]
    const device uchar* blocks [[buffer(1)]],  // [outputs, columns / 32, bytes of a block]
    const device T* bias [[buffer(2)]],        // [outputs]
    device T* y [[buffer(3)]],                 // [rows, outputs]
    constant BlocksParams& params [[buffer(4)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint simdgroups [[simdgroups_per_threadgroup]]) {
  constexpr bool exact = is_same_v<T, float>;
  static_assert(exchange_size <= scratch_size<F, B>(), "tiles leave room for an exchange");
  threadgroup float partials[kProductPartials];
  threadgroup uint4 scratch[kProductSimdgroups * scratch_size<F, B>()];

  const uint first_output = group.x * params.outputs_per_group;
  const uint outputs = min(params.outputs - first_output, params.outputs_per_group);
  const uint first_row = group.y * M;
  const uint products = params.outputs_per_group * M;  // of a simdgroup
  const size_t row_bytes = size_t(params.columns / block_columns) * block_bytes<F>();
  threadgroup uint4* exchange = scratch + simdgroup * scratch_size<F, B>();
  threadgroup uint* own = (threadgroup uint*)exchange;
  x += size_t(first_row) * params.columns;

  Gathering to;
  to.partials = partials + simdgroup * products;
  to.lane = lane;
  const uint step = simdgroups * 32 * block_columns;
  for (uint begin = simdgroup * 32 * block_columns; begin < params.columns; begin += step) {
    const uint column = begin + lane * block_columns;
    const bool inside = column < params.columns;
    Tiles tiles;
    tiles.blocks = blocks;
    tiles.first = first_output * row_bytes + begin / block_columns * block_bytes<F>();
    tiles.row_bytes = row_bytes;
    tiles.size = min((params.columns - begin) / block_columns, 32u) * block_bytes<F>();
    tiles.ahead = row_bytes % 128 == 0 ? uint(tiles.first) % 128 / 4 : 0;
    ActivationPacks<T, block_columns, M> packs;
    load_activations(x, params.rows - first_row, params.columns, begin, lane, packs);
    // The first weights are on their way while the activations are made ready.
    const uint batched = outputs / B * B;
    TileShare<F, B> share;
    if (batched > 0) {
      load_tiles<F, B>(tiles, 0, lane, share);
    }
    Activations<block_columns, M> a;
    take_activations<T, F, exact>(packs, lane, exchange, a);
    to.add = begin >= step;
    pass_blocks<T, F, exact, M, B>(a, inside, tiles, share, 0, batched, params.two23, own, to);
    if (batched < outputs) {
      TileShare<F, 1> last;
      load_tiles<F, 1>(tiles, batched, lane, last);
      pass_blocks<T, F, exact, M, 1>(a, inside, tiles, last, batched, outputs, params.two23, own, to);
    }
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = t; i < outputs * M; i += simdgroups * 32) {
    const uint row = first_row + i % M;
    const uint output = first_output + i / M;
    if (row < params.rows) {
      const float sum = gathered(partials, i, products, simdgroups) + (params.has_bias ? float(bias[output]) : 0.0f);
      y[size_t(row) * params.outputs + output] = T(sum);
    }
  }
}

#define instantiate_blocks(kind, M, B) instantiate_types("block_matmul_" #kind "_" #M, block_matmul, kind, M, B)

instantiate_blocks(q4_0, 1, 4)
instantiate_blocks(q4_0, 2, 4)
instantiate_blocks(q8_0, 1, 2)
instantiate_blocks(q8_0, 2, 2)
