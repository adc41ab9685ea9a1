// Products of a few rows of x with GGUF blocks as a .gguf file stores them:
//
//   y[m, n] = sum_k x[m, k] * w[n, k] + b[n],   w[n, k] = d * (q - zero), d shared by 32 k
//
// A block is a half d, then 16 bytes of 4-bit integers (q4_0: 18 bytes) or 32 signed bytes (q8_0: 34). Each lane
// multiplies one block; since blocks start on any even byte, a simdgroup first brings the 32 blocks of a row in by
// packs of 16 bytes, neighbours by neighbours, and lanes pick theirs up from threadgroup memory. What lanes load at once
// are whole lines of 128 bytes, wherever a row begins, if the array of blocks begins on a line (a view may not).
// Otherwise as matmul/nvidia/qmv.metal.
#include <metal_stdlib>

#include "matmul/products.h"
#include "mittens/instantiate.h"
#include "params/matmul.h"

using namespace metal;
using namespace mittens;

template <Format F>
constexpr int block_bytes() {
  return 2 + kBlockColumns * bits_of<F>() / 8;
}

// Packs that hold 32 blocks, which start on any even byte, and how many of the whole ones each lane brings in: lane 0 may
// begin up to 7 packs before them.
template <Format F>
constexpr int tile_packs() {
  return (32 * block_bytes<F>() + 14 + 15) / 16;
}
template <Format F>
constexpr int lane_packs() {
  return (2 * block_bytes<F>() + 7 + 31) / 32;
}

// Packs of threadgroup memory that a simdgroup has for B tiles, and for its activations before them.
template <Format F, int B>
constexpr int scratch_size() {
  return B * tile_packs<F>();
}

// The same columns of all rows: up to 32 blocks of each. lines: rows are whole lines, so that all tiles begin alike.
template <bool lines>
struct Tiles {
  const device uchar* blocks;
  size_t first;  // byte of the first row's tile
  size_t row_bytes;
  uint size;  // bytes of a tile
};

template <bool lines>
inline size_t start_of(Tiles<lines> tiles, uint row) {
  return tiles.first + row * tiles.row_bytes;
}

// Bytes from the start of a line to a row's tile.
template <bool lines>
inline uint offset_of(Tiles<lines> tiles, uint row) {
  return uint(lines ? tiles.first : start_of(tiles, row)) % 128;
}

// A row's tile as lanes bring it in, in bytes from its first pack on.
struct TilePlace {
  // The lane's; lane 0's is the first of a line. Where that is before the tile it wraps around, past the tile's end.
  uint first_pack;
  uint end;   // of the tile
  uint tail;  // the lane's half of what follows the last whole pack
};

template <bool lines>
inline TilePlace place_of(Tiles<lines> tiles, uint row, uint lane) {
  const uint offset = offset_of(tiles, row);
  const uint end = offset % 16 + tiles.size;
  return {lane * 16 - offset / 16 * 16, end, end / 16 * 16 + lane * 2};
}

// Whether the lane's i-th pack is whole and of the tile.
inline bool has_pack(TilePlace place, int i) {
  return place.first_pack + 512 * i < place.end - 15;
}

// A lane's share of B tiles on their way to threadgroup memory. Of tails lanes have 0 where the tile has ended.
template <Format F, int B>
struct TileShare {
  uint4 packs[B][lane_packs<F>()];
  ushort tails[B];
};

template <Format F, int B, bool lines>
inline void load_tiles(Tiles<lines> tiles, uint row, uint lane, thread TileShare<F, B>& share) {
#pragma unroll
  for (int r = 0; r < B; ++r) {
    const TilePlace place = place_of(tiles, row + r, lane);
    const device uchar* tile = tiles.blocks + start_of(tiles, row + r) / 16 * 16;
    const device uchar* packs = tile + int(place.first_pack);
#pragma unroll
    for (int i = 0; i < lane_packs<F>(); ++i) {
      if (has_pack(place, i)) {
        share.packs[r][i] = *(const device uint4*)(packs + 512 * i);
      }
    }
    share.tails[r] = 0;
    if (place.tail < place.end) {
      share.tails[r] = *(const device ushort*)(tile + place.tail);
    }
  }
}

template <Format F, int B, bool lines>
inline void store_tiles(
    thread const TileShare<F, B>& share, Tiles<lines> tiles, uint row, uint lane, threadgroup uint4* scratch) {
#pragma unroll
  for (int r = 0; r < B; ++r) {
    const TilePlace place = place_of(tiles, row + r, lane);
    threadgroup uchar* tile = (threadgroup uchar*)(scratch + r * tile_packs<F>());
#pragma unroll
    for (int i = 0; i < lane_packs<F>(); ++i) {
      if (has_pack(place, i)) {
        *(threadgroup uint4*)(tile + (place.first_pack + 512 * i)) = share.packs[r][i];
      }
    }
    if (lane < 8) {
      *(threadgroup ushort*)(tile + place.tail) = share.tails[r];
    }
  }
}

// Takes this lane's block out of a tile in threadgroup memory: its integers, and d.
template <Format F>
inline float take_block(
    const threadgroup uint* tile, uint phase, uint lane, thread uint (&words)[bits_of<F>()]) {
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
template <Format F, bool exact, int M, int B, bool lines>
inline void pass_blocks(
    thread const Activations<kBlockColumns, M>& a, bool inside, Tiles<lines> tiles, thread TileShare<F, B>& share,
    uint first, uint end, uint two23, threadgroup uint4* scratch, PartialProducts to) {
  for (; first < end; first += B) {
    simdgroup_barrier(mem_flags::mem_threadgroup);  // all lanes have taken their blocks of the tiles before
    store_tiles(share, tiles, first, to.lane, scratch);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (first + B < end) {
      load_tiles(tiles, first + B, to.lane, share);
    }
    float totals[B * M];
    clear(totals);
    if (inside) {
#pragma unroll
      for (int r = 0; r < B; ++r) {
        const threadgroup uint* tile = (const threadgroup uint*)(scratch + r * tile_packs<F>());
        uint block[bits_of<F>()];
        float sums[M];
        const float d = take_block<F>(tile, offset_of(tiles, first + r) % 16, to.lane, block);
        multiply_words<F, exact, bits_of<F>(), M>(a, block, two23, sums);
#pragma unroll
        for (int m = 0; m < M; ++m) {
          totals[r * M + m] = d * sums[m];
        }
      }
    }
    add_totals(totals, to, first * M);
  }
}

// lines: whether rows of blocks are whole lines.
template <typename T, Format F, int M, int B, bool lines>
[[kernel, threads_at_most(256, M > 1 ? 256 : 384)]] void block_matmul(
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
  const size_t row_bytes = size_t(params.columns / kBlockColumns) * block_bytes<F>();
  threadgroup uint4* exchange = scratch + simdgroup * scratch_size<F, B>();
  x += size_t(first_row) * params.columns;

  PartialProducts to;
  to.partials = partials + simdgroup * products;
  to.lane = lane;
  const uint step = simdgroups * 32 * kBlockColumns;
  for (uint begin = simdgroup * 32 * kBlockColumns; begin < params.columns; begin += step) {
    const bool inside = begin + lane * kBlockColumns < params.columns;
    Tiles<lines> tiles;
    tiles.blocks = blocks;
    tiles.first = first_output * row_bytes + begin / kBlockColumns * block_bytes<F>();
    tiles.row_bytes = row_bytes;
    tiles.size = min((params.columns - begin) / kBlockColumns, 32u) * block_bytes<F>();
    ActivationPacks<T, kBlockColumns, M> packs;
    load_activations(x, params.rows - first_row, params.columns, begin, lane, packs);
    // The first weights are on their way while the activations are made ready.
    const uint batched = outputs / B * B;
    TileShare<F, B> share;
    if (batched > 0) {
      load_tiles(tiles, 0, lane, share);
    }
    Activations<kBlockColumns, M> a;
    take_activations<T, F, exact>(packs, lane, exchange, a);
    to.add = begin >= step;
    pass_blocks<F, exact>(a, inside, tiles, share, 0, batched, params.two23, exchange, to);
    if (batched < outputs) {
      TileShare<F, 1> last;
      load_tiles(tiles, batched, lane, last);
      pass_blocks<F, exact>(a, inside, tiles, last, batched, outputs, params.two23, exchange, to);
    }
  }

  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = t; i < outputs * M; i += simdgroups * 32) {
    const uint row = first_row + i % M;
    const uint output = first_output + i / M;
    if (row < params.rows) {
      const float sum = sum_headroom<F>() * sum_of_simdgroups(partials, i, products, simdgroups) +
          (params.has_bias ? float(bias[output]) : 0.0f);
      y[size_t(row) * params.outputs + output] = T(sum);
    }
  }
}

#define instantiate_blocks(kind, M, B)                                                  \
  instantiate_types("block_matmul_lines_" #kind "_" #M, block_matmul, kind, M, B, true)  \
  instantiate_types("block_matmul_any_" #kind "_" #M, block_matmul, kind, M, B, false)

instantiate_blocks(q4_0, 1, 4)
instantiate_blocks(q4_0, 2, 4)
instantiate_blocks(q8_0, 1, 2)
instantiate_blocks(q8_0, 2, 2)
