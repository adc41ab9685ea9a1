// Rows of a cache's tokens, by their indices.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace mittens::cpu {

struct TokenRows {
  const void* data;
  std::array<int64_t, 3> strides;  // in elements: batch, head, token
  size_t width;  // of a row
  void* taken;  // [batch, heads, count, width]
};

struct TakeTokens {
  std::array<TokenRows, 2> parts;  // keys and values
  const uint32_t* indices;  // [batch, heads, count]
  std::array<int64_t, 2> index_strides;
  bool is_signed;  // negative indices count from the end
  size_t batch;
  size_t heads;
  size_t tokens;
  size_t count;
  size_t item_bytes;
  uint32_t nan;  // of the type, in the lower bytes
};

// An index that is out of range gives a row of NaN.
void take_tokens(const TakeTokens& call);

}  // namespace mittens::cpu
