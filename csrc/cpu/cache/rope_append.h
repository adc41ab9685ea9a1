// Rotary embedding of new queries and keys, and keys and values into a cache, on the CPU. All arrays are of one type,
// but for words of quantized keys and values.
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace mittens::cpu {

// [batch, heads, tokens, width] by strides; the last is 1.
struct Heads {
  const void* data;
  int64_t strides[3];  // batch, head, token
};

// Where new keys or values go, [batch, key heads, capacity, ..]: elements, or words, scales and biases.
struct CacheBuffer {
  void* data;
  void* scales = nullptr;
  void* biases = nullptr;
};

struct RopeAppend {
  Type type;
  Heads new_queries;
  Heads new_keys;
  Heads new_values;
  Heads shared_key;  // the turned columns of all heads of keys, where `begin` is not 0
  const float* freqs;  // [pairs] or nullptr
  const void* query_norm;  // [width] or nullptr
  const void* key_norm;  // [width] or nullptr
  const void* value_norm;  // [value width] or nullptr
  const int32_t* offsets;  // [batch], or nullptr where `offset` holds for all
  void* queries;  // [batch, query heads, tokens, width]
  CacheBuffer keys;  // [batch, key heads, key capacity, ..]; only the new tokens are written
  CacheBuffer values;  // [batch, key heads, value capacity, ..]
  size_t batch;
  size_t query_heads;
  size_t key_heads;
  size_t tokens;
  size_t width;
  size_t value_width;  // another one only where they are not quantized
  size_t begin;  // the first column that is rotated
  size_t pairs;  // of elements that are rotated
  size_t key_capacity;
  size_t value_capacity;
  size_t first;  // where the first token's key and value go
  int offset;  // the first token's position
  float scale;  // of positions
  float base;
  float eps;  // of the norms
  float weight_offset;  // added to their weights
  float query_scale;  // of turned queries
  float value_scale;  // of normed values
  bool traditional;  // pairs are neighbours
  size_t group_size;  // of quantized keys and values: 32, 64 or 128
  size_t bits;  // 0 where they are not quantized
};

void rope_append(const RopeAppend& call);

}  // namespace mittens::cpu
