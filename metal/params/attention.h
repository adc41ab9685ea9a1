// Compiled by C++ and by Metal.
#pragma once

#ifndef __METAL_VERSION__
#include <cstdint>
#endif

namespace mittens {

// Of a simdgroup: rows of queries, and keys of a block.
enum { kQueryRows = 8, kKeyRows = 8 };

// Simdgroups of a threadgroup: in decoding they share the keys of the same rows, in prompts each has rows of its own, whose
// queries lie in threadgroup memory.
enum { kDecodeSimdgroups = 4 };
constexpr int attention_prompt_simdgroups(int width) {
  return width <= 128 ? 4 : width <= 256 ? 2 : 1;
}

// Blocks of keys that a simdgroup takes at once, at most: as many as registers have room for.
constexpr int attention_key_blocks(int value_width, bool is_half) {
  return value_width <= 64 && is_half ? 2 : 1;
}

// The same of kernels that load ahead, on NVIDIA GPUs: each takes this many, or half of them.
enum { attention_key_blocks_ahead = 2 };

// How many threadgroups share the columns of the values, whose sums would not all fit the registers.
constexpr int attention_value_slices(int value_width) {
  return value_width > 256 ? (value_width + 255) / 256 : 1;
}

// How the scores of a row of queries are changed before their softmax.
enum AttentionMask : uint32_t { no_mask, bool_mask, additive_mask };

// Where the rows of an array [batch, head, token, width] are, in elements, of packed ones in words. `start` counts from
// the binding, as strides may be negative.
struct TokenRows {
  int64_t start;
  int64_t batch;
  int64_t head;
  int64_t token;

#ifdef __METAL_VERSION__
  // The place of a row: from 0 on, or from a pointer on.
  template <typename From>
  static From at(From from, TokenRows rows, uint batch, uint head, uint token) {
    return from + rows.start + batch * rows.batch + head * rows.head + token * rows.token;
  }
#endif
};

struct AttentionParams {
  TokenRows query;
  TokenRows key;
  TokenRows value;
  TokenRows key_scale;  // of packed keys and values
  TokenRows key_bias;
  TokenRows value_scale;
  TokenRows value_bias;
  TokenRows mask;        // token: a query
  int64_t mask_key;      // stride of the mask's keys; strides are 0 where the mask is broadcast
  uint32_t group_shift;  // a group is 1 << group_shift integers
  uint32_t batches;
  uint32_t key_heads;
  uint32_t ratio;  // heads of queries that share a key head
  uint32_t queries;
  uint32_t keys;
  uint32_t value_width;
  uint32_t first_key;  // earlier ones are not read; a multiple of simdgroups' steps
  uint32_t causal;     // query i sees keys up to i + keys - queries
  uint32_t window;     // and of these only the last `window`; 0: all
  uint32_t mask_kind;  // AttentionMask
  uint32_t has_sinks;
  uint32_t has_logsumexp;
  uint32_t splits;  // threadgroups that share the keys of a row
  uint32_t keys_per_split;
  float scale;  // the op's; for half types log2(e) times it
};

// Attention whose rows of the batch have keys of their own. The scale stays last: where more follows, LLVM widens its load
// to a vector that Mesa's compiler refuses.
struct RaggedAttentionParams {
  uint32_t has_starts;
  uint32_t has_ends;
  uint32_t start_batch;  // strides of the starts
  uint32_t start_query;
  AttentionParams attention;  // keys_per_split is 0 where a row's own keys are shared out evenly
};

// Attention whose keys and values lie in blocks of a pool: [blocks, key heads, keys of a block, ..], so that the first of
// the strides of keys and values are from block to block.
struct PagedAttentionParams {
  uint32_t blocks;         // of the pool
  uint32_t block_shift;    // a block is 1 << block_shift keys
  uint32_t table_entries;  // of a row of the table
  uint32_t table_row;      // stride of the table's rows
  AttentionParams attention;
};

// Threads of a threadgroup that unpacks keys or values, and the elements of each.
enum { kUnpackThreads = 256, kUnpacked = 8 };

struct AttentionUnpackParams {
  TokenRows words;
  TokenRows scales;
  TokenRows biases;
  uint32_t heads;
  uint32_t tokens;
  uint32_t width;
  uint32_t group_shift;  // a group is 1 << group_shift integers
};

// Simdgroups of a threadgroup that puts the parts of a row together.
enum { kCombineSimdgroups = 8 };

struct AttentionCombineParams {
  uint32_t rows;   // batch * heads * queries
  uint32_t width;  // of the values
  uint32_t splits;
  uint32_t has_logsumexp;
};

struct AttentionCascadeParams {
  uint32_t batches;
  uint32_t heads;
  uint32_t queries;
  uint32_t width;  // of the values
  uint32_t prefix_splits;
  uint32_t own_splits;
};

}  // namespace mittens
