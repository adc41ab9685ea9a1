// Rotary embedding of new queries and keys, and keys and values into a cache, on the CPU. All arrays are of one type.
#pragma once

#include <cstdint>

#include "cpu/types.h"

namespace mittens::cpu {

// [batch, heads, tokens, width] by strides, the last of which is 1.
struct Heads {
  const void* data;
  int64_t strides[3];  // batch, head, token
};

struct RopeAppend {
  Type type;
  Heads new_queries;
  Heads new_keys;
  Heads new_values;
  const float* freqs;  // [pairs] or nullptr
  const void* query_norm;  // [width] or nullptr
  const void* key_norm;  // [width] or nullptr
  const int32_t* offsets;  // [batch], or nullptr where `offset` is that of all
  void* queries;  // [batch, query heads, tokens, width]
  void* keys;  // [batch, key heads, key capacity, width], of which the new tokens are written
  void* values;  // [batch, key heads, value capacity, width]
  size_t batch;
  size_t query_heads;
  size_t key_heads;
  size_t tokens;
  size_t width;
  size_t pairs;  // of elements that are rotated
  size_t key_capacity;
  size_t value_capacity;
  size_t first;  // where the first token's key and value go
  int offset;  // the first token's position
  float scale;  // of positions
  float base;
  float eps;  // of the norms
};

void rope_append(const RopeAppend& call);

}  // namespace mittens::cpu
