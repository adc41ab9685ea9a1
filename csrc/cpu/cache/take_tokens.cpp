#include "cpu/cache/take_tokens.h"

#include <algorithm>
#include <cstring>

#include "cpu/parallel.h"

namespace mittens::cpu {

namespace {

constexpr size_t bytes_of_task = size_t{1} << 15;

}  // namespace

void take_tokens(const TakeTokens& call) {
  const size_t row_bytes = (call.parts[0].width + call.parts[1].width) * call.item_bytes + 1;
  parallel_for(call.batch * call.heads * call.count, bytes_of_task / row_bytes + 1, [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row) {
      const auto batch = static_cast<int64_t>(row / call.count / call.heads);
      const auto head = static_cast<int64_t>(row / call.count % call.heads);
      const uint32_t index =
          call.indices[batch * call.index_strides[0] + head * call.index_strides[1] + row % call.count];
      const bool from_end = call.is_signed && static_cast<int32_t>(index) < 0;
      const uint32_t token = index + (from_end ? static_cast<uint32_t>(call.tokens) : 0);
      for (const TokenRows& part : call.parts) {
        const size_t bytes = part.width * call.item_bytes;
        auto* const to = static_cast<std::byte*>(part.taken) + row * bytes;
        if (token < call.tokens) {
          const int64_t at = batch * part.strides[0] + head * part.strides[1] + int64_t{token} * part.strides[2];
          std::memcpy(to, static_cast<const std::byte*>(part.data) + at * static_cast<int64_t>(call.item_bytes), bytes);
        } else {
          for (size_t i = 0; i < bytes; i += call.item_bytes) {
            std::memcpy(to + i, &call.nan, call.item_bytes);
          }
        }
      }
    }
  });
}

}  // namespace mittens::cpu
