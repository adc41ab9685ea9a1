// What blocks of keys leave of a row, in float32, where several threads share its keys.
#pragma once

#include "cpu/isa/attention/attention_head.h"

namespace mittens::cpu::MITTENS_ISA {

// Where the rows of one share of the keys go: each row's largest score, its sum, then its values.
class Partials {
 public:
  Partials(float* data, size_t value_width) : data_(data), stride_(row_size(value_width)) {}

  static size_t row_size(size_t value_width) {
    return width + padded_width(value_width);
  }

  explicit operator bool() const {
    return data_ != nullptr;
  }
  float* state(size_t row) const {
    return data_ + row * stride_;
  }
  float* values(size_t row) const {
    return state(row) + width;
  }

 private:
  float* data_;
  size_t stride_;
};

// Shares of a head's keys put together; they lie `rows` apart.
template <typename T>
void combine(const Head<T>& head, const Partials& partials, size_t row, size_t shares) {
  const size_t columns = padded_width(head.call.value_width);
  float max = -infinity;
  for (size_t s = 0; s < shares; ++s) {
    const float other = partials.state(s * head.rows + row)[0];
    max = other > max ? other : max;
  }
  const float shift = max == -infinity ? 0.0f : max;
  float* total = partials.values(row);
  float sum = 0;
  for (size_t s = 0; s < shares; ++s) {
    const float* state = partials.state(s * head.rows + row);
    const float* values = partials.values(s * head.rows + row);
    const float factor = exp(state[0] - shift);
    sum += state[1] * factor;
    for (size_t i = 0; i < columns; i += width) {
      const Float before = s == 0 ? Float{} : read<Float>(total + i, All());
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
  float* state = partials.state(share * head.rows + row);
  state[0] = max;
  state[1] = sum;
  __builtin_memcpy(partials.values(share * head.rows + row), values,
                   padded_width(head.call.value_width) * sizeof(float));
}

}  // namespace mittens::cpu::MITTENS_ISA
