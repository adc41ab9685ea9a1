#include "cpu/gather.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/gemv.h"
#include "cpu/parallel.h"

namespace mittens::cpu {

namespace {

constexpr size_t copied_bytes = 64 << 10;  // by one thread at a time

void fill_nan(Type type, void* y, size_t count) {
  if (type == Type::float32) {
    std::fill_n(static_cast<uint32_t*>(y), count, 0x7fc00000u);
  } else {
    std::fill_n(static_cast<uint16_t*>(y), count, static_cast<uint16_t>(type == Type::float16 ? 0x7e00 : 0x7fc0));
  }
}

// The pairs of each chosen matrix; those with an index out of range are of none.
class Groups {
 public:
  explicit Groups(const Gather& gather) : gather_(gather), first_(gather.stack + 1, 0) {
    for (size_t p = 0; p < gather.pairs; ++p) {
      if (is_valid(p)) {
        ++first_[gather.matrices[p] + 1];
      }
    }
    for (size_t i = 0; i < gather.stack; ++i) {
      if (first_[i + 1] > 0) {
        chosen_.push_back(static_cast<uint32_t>(i));
      }
      first_[i + 1] += first_[i];
    }
    pairs_.resize(first_.back());
    std::vector<size_t> next(first_.begin(), first_.end() - 1);
    for (size_t p = 0; p < gather.pairs; ++p) {
      if (is_valid(p)) {
        pairs_[next[gather.matrices[p]]++] = p;
      }
    }
    std::stable_sort(chosen_.begin(), chosen_.end(), [&](uint32_t a, uint32_t b) { return size(a) < size(b); });
  }

  bool is_valid(size_t p) const {
    return gather_.matrices[p] < gather_.stack && input_of(p) < gather_.input_count;
  }

  size_t input_of(size_t p) const {
    return gather_.inputs ? gather_.inputs[p] : p / gather_.pairs_per_input;
  }

  size_t size(uint32_t matrix) const {
    return first_[matrix + 1] - first_[matrix];
  }

  // Calls f(matrices, count, pairs of each) for the chosen matrices of each number of pairs.
  template <typename F>
  void each_size(const F& f) const {
    for (size_t begin = 0, end; begin < chosen_.size(); begin = end) {
      end = begin + 1;
      while (end < chosen_.size() && size(chosen_[end]) == size(chosen_[begin])) {
        ++end;
      }
      f(chosen_.data() + begin, end - begin, size(chosen_[begin]));
    }
  }

  const size_t* pairs_of(uint32_t matrix) const {
    return pairs_.data() + first_[matrix];
  }

 private:
  const Gather& gather_;
  std::vector<size_t> first_;  // of each matrix, in pairs_
  std::vector<size_t> pairs_;
  std::vector<uint32_t> chosen_;  // by the number of their pairs
};

// Calls product(matrices, count, x, y, rows) for chosen matrices with the same number of rows, which lie one after
// another in x and y.
template <typename Product>
void gather_products(Type type, const Gather& gather, const void* x, void* y, const Product& product) {
  const size_t item = type == Type::float32 ? 4 : 2;
  const size_t x_bytes = gather.rows * gather.columns * item, y_bytes = gather.rows * gather.outputs * item;
  const char* from = static_cast<const char*>(x);
  char* to = static_cast<char*>(y);
  const Groups groups(gather);
  for (size_t p = 0; p < gather.pairs; ++p) {
    if (!groups.is_valid(p)) {
      fill_nan(type, to + p * y_bytes, gather.rows * gather.outputs);
    }
  }
  groups.each_size([&](const uint32_t* matrices, size_t count, size_t pairs) {
    auto pair = [&](size_t i) { return groups.pairs_of(matrices[i / pairs])[i % pairs]; };
    const Scratch xs((count * pairs * x_bytes + 3) / 4), ys((count * pairs * y_bytes + 3) / 4);
    char* x_packed = reinterpret_cast<char*>(xs.data());
    char* y_packed = reinterpret_cast<char*>(ys.data());
    parallel_for(count * pairs, copied_bytes / (x_bytes + 1) + 1, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        std::memcpy(x_packed + i * x_bytes, from + groups.input_of(pair(i)) * x_bytes, x_bytes);
      }
    });
    product(matrices, count, x_packed, y_packed, pairs * gather.rows);
    parallel_for(count * pairs, copied_bytes / (y_bytes + 1) + 1, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        std::memcpy(to + pair(i) * y_bytes, y_packed + i * y_bytes, y_bytes);
      }
    });
  });
}

template <typename T>
std::vector<T> chosen_of(const T* stack, const uint32_t* matrices, size_t count) {
  std::vector<T> chosen;
  chosen.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    chosen.push_back(stack[matrices[i]]);
  }
  return chosen;
}

}  // namespace

void gather_quantized(Type type, const QuantizedWeights* stack, const Gather& gather, const void* x, void* y) {
  gather_products(type, gather, x, y, [&](const uint32_t* matrices, size_t count, void* x, void* y, size_t rows) {
    const auto chosen = chosen_of(stack, matrices, count);
    quantized_matmul(type, chosen.data(), x, nullptr, y, count, rows, gather.columns, gather.outputs, false);
  });
}

void gather_dense(Type type, const void* const* stack, size_t weight_stride, bool transpose, const Gather& gather,
                  const void* x, void* y) {
  gather_products(type, gather, x, y, [&](const uint32_t* matrices, size_t count, void* x, void* y, size_t rows) {
    const auto chosen = chosen_of(stack, matrices, count);
    gemv(type, chosen.data(), weight_stride, transpose, x, nullptr, y, count, rows, gather.columns, gather.outputs,
         false);
  });
}

void gather_swiglu(Type type, Activation activation, const QuantizedWeights* gate, const QuantizedWeights* up,
                   const Gather& gather, const void* x, void* y) {
  gather_products(type, gather, x, y, [&](const uint32_t* matrices, size_t count, void* x, void* y, size_t rows) {
    const auto gates = chosen_of(gate, matrices, count), ups = chosen_of(up, matrices, count);
    quantized_swiglu(type, activation, gates.data(), ups.data(), x, y, count, rows, gather.columns, gather.outputs,
                     false);
  });
}

}  // namespace mittens::cpu
