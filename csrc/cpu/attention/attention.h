// Attention on the CPU: y = softmax(scale * q k^T + mask) v, block by block of keys, so that the scores of a head are
// never all there. Scores, sums and their state are float32.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

// [batch, heads, rows, ..] with its last stride 1 and any others, in elements.
struct AttentionView {
  const void* data;
  int64_t batch;
  int64_t head;
  int64_t row;
};

// Keys or values: of the call's type, or packed as integers q of bits for w = scale * q + bias in groups along the row.
struct AttentionRows {
  AttentionView rows;  // packed: words
  AttentionView scales;
  AttentionView biases;
  int bits;  // 4 or 8; 0 where they are not packed
  int group_size;
};

// A row that sees no key, by mask, causality and window, gets 0.
enum class MaskKind { none, boolean, additive };

struct AttentionMask {
  MaskKind kind;
  AttentionView values;  // [batch, heads, queries, keys], strides 0 where it is broadcast
  int64_t column;  // stride from key to key
};

// The blocks of a pool that hold a row's keys: the pool is [blocks, heads, 1 << shift keys, ..], so that the batch
// stride of keys and values is from block to block. Entries beyond the row's keys are not followed.
struct BlockTable {
  const int32_t* entries = nullptr;  // [batch, count]; null: keys and values are not in blocks
  size_t count = 0;
  size_t row = 0;  // stride of the table's rows
  size_t blocks = 0;  // of the pool
  unsigned shift = 0;

  bool has(size_t entry) const {
    return static_cast<uint32_t>(entries[entry]) < blocks;
  }
};

struct Attention {
  Type type;
  size_t batch;
  size_t heads;
  size_t key_heads;  // divides heads
  size_t queries;
  size_t keys;
  size_t width;
  size_t value_width;
  AttentionView q;
  AttentionRows k;
  AttentionRows v;
  AttentionMask mask;
  const void* sinks;  // [heads] or nullptr: a score without a value
  void* y;  // [batch, heads, queries, value_width], row contiguous
  float* logsumexp;  // [batch, heads, queries] or nullptr: of a row's scores and its sink; -infinity without a score
  float scale;
  bool causal;  // query i sees keys up to i + keys - queries
  int64_t window;  // the last keys of these to attend to; 0: all
  // Whether each query's result equals, bit for bit, a call of this query and the keys in its range alone, with
  // any number of threads.
  bool exact;
  BlockTable table;
};

void attention(const Attention& call);

}  // namespace mittens::cpu
