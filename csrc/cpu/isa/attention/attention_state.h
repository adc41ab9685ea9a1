// The partial results of a row from blocks of keys, in float32, where several threads share its keys.
#pragma once

#include "cpu/isa/attention/attention_head.h"

namespace mittens::cpu::MITTENS_ISA {

// Where the rows of each share of the keys go: each row's largest score, its sum, then its values.
class Partials {
 public:
  // Of a number of rows, in a number of shares, from the first on.
  Partials(float* data, size_t value_width, size_t rows, size_t first_row = 0, size_t first_share = 0)
      : data_(data), stride_(row_size(value_width)), rows_(rows), first_row_(first_row), first_share_(first_share) {}

  static size_t row_size(size_t value_width) {
    return width + padded_width(value_width);
  }

  explicit operator bool() const {
    return data_ != nullptr;
  }
  float* state(size_t share, size_t row) const {
    return data_ + ((share - first_share_) * rows_ + row - first_row_) * stride_;
  }
  float* values(size_t share, size_t row) const {
    return state(share, row) + width;
  }

 private:
  float* data_;
  size_t stride_;
  size_t rows_;
  size_t first_row_;
  size_t first_share_;
};

// Shares of a row's keys put together.
template <typename T>
void combine(const Head<T>& head, const Partials& partials, size_t row, Range shares) {
  if (shares.begin >= shares.end) {
    return head.finish(row, -infinity, 0.0f, nullptr);
  }
  float* total = partials.values(shares.begin, row);
  if (shares.end - shares.begin == 1) {
    const float* state = partials.state(shares.begin, row);
    return head.finish(row, state[0], state[1], total);
  }
  const size_t columns = padded_width(head.call.value_width);
  float max = -infinity;
  for (size_t s = shares.begin; s < shares.end; ++s) {
    const float other = partials.state(s, row)[0];
    max = other > max ? other : max;
  }
  const float shift = max == -infinity ? 0.0f : max;
  float sum = 0;
  for (size_t s = shares.begin; s < shares.end; ++s) {
    const float* state = partials.state(s, row);
    const float* values = partials.values(s, row);
    const float factor = exp(state[0] - shift);
    sum += state[1] * factor;
    for (size_t i = 0; i < columns; i += width) {
      const Float before = s == shares.begin ? Float{} : read<Float>(total + i, All());
      write(total + i, fma(read<Float>(values + i, All()), spread(factor), before), All());
    }
  }
  head.finish(row, max, sum, total);
}

// A row after one share of its keys: finished, or kept for combine().
template <typename T>
MITTENS_INLINE void leave(const Head<T>& head, const Partials& partials, size_t share, size_t row, float max, float sum,
                          float* values) {
  if (!partials) {
    return head.finish(row, max, sum, values);
  }
  float* state = partials.state(share, row);
  state[0] = max;
  state[1] = sum;
  __builtin_memcpy(partials.values(share, row), values, padded_width(head.call.value_width) * sizeof(float));
}

}  // namespace mittens::cpu::MITTENS_ISA
